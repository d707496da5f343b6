-- Quotas of users, clients (KIP-546) and addresses (KIP-612).

create table client_quota (
    user_name  text collate "C" not null,
    client_id  text collate "C" not null,
    address    text collate "C" not null,
    name       text not null,
    value      double precision not null,
    primary key (user_name, client_id, address, name)
);

comment on table client_quota is 'As AlterClientQuotas set them.';
comment on column client_quota.user_name is 'Empty: of any user; *: the default of users; else = and the name.';
comment on column client_quota.client_id is 'Likewise.';
comment on column client_quota.address is 'Likewise, of IP addresses.';

alter table cluster add column client_quotas_revision bigint not null default 1;

comment on column cluster.client_quotas_revision is 'The revision of the last change of quotas.';
