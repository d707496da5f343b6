-- Access control lists.

create table acl (
    acl_key        bytea primary key,
    resource_type  smallint not null,
    pattern_type   smallint not null,
    resource_name  text not null,
    principal      text not null,
    host           text not null,
    operation      smallint not null,
    permission     smallint not null
);

comment on table acl is 'As CreateAcls made them. The numbers are Kafka''s codes.';
comment on column acl.acl_key is 'A digest of all the others: they may be longer together than a key may be.';

alter table cluster add column acls_revision bigint not null default 1;

comment on column cluster.acls_revision is 'The revision of the last change of ACLs.';

create table node_authorizer (
    node_id      integer primary key,
    incarnation  bigint not null,
    authorizer   text not null
);

comment on table node_authorizer is 'By which authorizer each node goes: the others tell when it is not theirs. Empty: none.';
