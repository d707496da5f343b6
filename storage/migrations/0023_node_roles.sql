-- What each node is in the cluster (`process.roles`). A program that does not know the table registers nodes that are both.

create table node_role (
    node_id               integer primary key,
    incarnation           bigint not null,
    is_broker             boolean not null,
    is_controller         boolean not null,
    controller_listeners  text[] not null
);

comment on table node_role is 'What each registered process is; without a row of its incarnation it is a broker and a controller.';
comment on column node_role.controller_listeners is 'Names of those of its listeners at which it is asked as a controller.';
