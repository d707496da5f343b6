-- What each node's catalog has come to, for `sluice nodes`. A program that does not know the column leaves it at 0.

alter table node add column catalog_revision bigint not null default 0;

comment on column node.catalog_revision is
    'The revision that this incarnation had converged to at its last renewal; 0: it has not said.';
