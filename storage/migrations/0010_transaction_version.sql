-- Transactions whose producers name no partitions (KIP-890), and features, by whose levels clients go (KIP-584).

alter table open_transaction add column begins_at_zero boolean not null default false;

comment on column open_transaction.begins_at_zero is
    'A partition that does not know the producer takes no first batch of it but the one with sequence 0.';

-- Clients are told that they need name no partitions once none of these is left: what they then send to a node of one would
-- be refused.
create table former_transaction_version (
    function_schema      text primary key,
    transaction_version  smallint not null
);

comment on table former_transaction_version is 'Functions of releases that serve a lower transaction.version than 2, and which.';

insert into former_transaction_version (function_schema, transaction_version)
select n.nspname, case when w.function_schema is null then 1 else 0 end
from pg_namespace n
left join release_without_transactions w on w.function_schema = n.nspname
where n.nspname ~ '^sluice_[0-9a-f]{12}$';

create table finalized_feature (
    name   text primary key,
    level  smallint not null
);

comment on table finalized_feature is 'Features whose level an administrator has set; the others are at the highest that all nodes serve.';
