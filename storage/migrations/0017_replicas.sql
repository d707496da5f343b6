-- Replicas that an administrator has named (KIP-455, KIP-460), and nodes that have a number by their settings.
alter table partition add column replicas integer[], add column leader integer;

comment on column partition.replicas is
    'Nodes in the order in which they are to lead; null: whichever are alive. Where bytes lie does not depend on it.';
comment on column partition.leader is
    'Of the replicas, who leads while it is alive, until another is elected; null: the first of them that is alive.';

alter table node add column is_given boolean not null default false;
comment on column node.is_given is 'Whether its settings say which number it has: then no other node is numbered so.';

alter table node drop constraint node_node_id_check;
alter table node add constraint node_node_id_check check (node_id >= 0);
