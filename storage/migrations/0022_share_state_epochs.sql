-- By what those go who begin, read and write the state of share partitions from outside (KIP-932's state and leader epochs).
alter table share_partition
    add column begun_epoch integer not null default 0,
    add column leader_epoch integer not null default 0;

comment on column share_partition.start_offset is '-1: the state was begun, and its first reader finds where by the group''s settings.';
comment on column share_partition.begun_epoch is
    'KIP-932''s state epoch: rises whenever the state is begun anew; who writes by an older one is refused.';
comment on column share_partition.leader_epoch is
    'The highest by which the state was read as a leader reads it since it was begun; who comes with an older one is refused.';
