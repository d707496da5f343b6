-- Subscriptions to clients' metrics (KIP-714).

create table client_metrics_config (
    subscription  text collate "C" not null,
    name          text not null,
    value         text not null,
    primary key (subscription, name)
);

comment on table client_metrics_config is 'Subscriptions, as IncrementalAlterConfigs set them. Who has no row is none.';

alter table cluster add column client_metrics_revision bigint not null default 1;

comment on column cluster.client_metrics_revision is 'The revision of the last change of subscriptions to clients'' metrics.';
