-- The process that writes an object. Once its registration has ended, other nodes seal the object and give back the room
-- that was reserved behind its bytes.

alter table log_object add column node_id integer, add column incarnation bigint;

comment on column log_object.node_id is
    'With incarnation, the registration of the process that opened the object; null: unknown, so only its age seals it.';
