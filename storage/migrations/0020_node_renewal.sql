-- When each node last prolonged its registration, for DescribeQuorum. A program that does not know the column leaves it as
-- it is: then `registered_at` is the last that is known.

alter table node add column renewed_at timestamptz;

comment on column node.renewed_at is 'When the registration was last prolonged; null: never, or by a program that does not say.';
