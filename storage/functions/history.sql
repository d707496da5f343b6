-- Histories: see storage/history.py.

create function adopt_history(p_identity text, p_known integer, p_begun integer default -1) returns integer
language plpgsql volatile
as $$
-- Return the history that the database is in. A new history begins if the recorded one has another identity, or if its
-- number is at most `p_known`, a history whose end the caller has seen (-1: none). The number of the new one is above
-- `p_begun`, a history that is known to have begun (-1: none). Then every leader epoch rises and begins at the log's
-- present end, ids that may have been assigned are not assigned again, and all registrations and
-- leases end. Producers of transactions are fenced: in the other history their transactions may have ended otherwise,
-- or have had records that are gone. Open transactions are overdue. A producer may continue with the epoch that this
-- history knows of it, but nothing that it sent counts as committed. So a row without a transaction says that its last
-- one was aborted. If an earlier new history has raised an epoch and the owner has sent nothing since, the owner still
-- has the epoch before that. A copy that is restored again begins from the same values, so the epochs rise by the
-- histories that it does not know, too.
declare
    c cluster;
    this_history integer;
    passed integer; -- numbers from the recorded history to the new one
    this_revision bigint;
    this_us bigint := extract(epoch from clock_timestamp()) * 1000000;
begin
    select * into c from cluster for no key update;
    if c.history_identity is null then
        update cluster set history_identity = p_identity;
        return c.history;
    end if;
    if c.history_identity = p_identity and c.history > p_known then
        return c.history;
    end if;
    this_history := greatest(c.history, p_known, p_begun) + 1;
    passed := this_history - c.history;
    this_revision := c.revision + 1000000::bigint * passed;
    update cluster
    set history = this_history, history_identity = p_identity, revision = this_revision,
        broker_configs_revision = this_revision, group_configs_revision = this_revision,
        client_quotas_revision = this_revision,
        acls_revision = this_revision,
        purged_revision = this_revision,
        -- Derived from the clock, so that no id is assigned twice even if the same copy is restored twice: fewer than
        -- one id per microsecond is assigned.
        next_producer_id = case when next_producer_id < this_us then this_us else next_producer_id + 1000000 end;
    -- A batch that waits for Postgres names its partition, and an upload its object. In units of the history's number,
    -- no id is assigned twice even if the same copy is restored twice.
    perform setval(ids.sequence, nextval(ids.sequence) + 1000000::bigint * this_history)
    from (
        values
            (pg_get_serial_sequence('partition', 'partition_key')::regclass),
            (pg_get_serial_sequence('log_object', 'object_id')::regclass)
    ) ids (sequence);
    update transactional_producer t
    set producer_epoch       = least(t.producer_epoch + 1000 * passed, 32767),
        last_producer_epoch  = case
            when t.state in ('Ongoing', 'CompleteAbort') and t.previous_producer_id = -1
                and t.last_producer_epoch between 0 and t.producer_epoch - 2
            then t.last_producer_epoch
            else t.producer_epoch end,
        previous_producer_id = -1,
        state                = case when t.started_at is null then 'CompleteAbort' else t.state end,
        ending_state         = case when t.ending_state is not null then 'CompleteAbort' end,
        last_started_at      = case when t.started_at is null then coalesce(t.last_started_at, clock_timestamp()) end,
        started_at           = t.started_at - t.timeout_ms * interval '1 millisecond' - interval '1 millisecond',
        revision             = t.revision + 1000 * passed,
        updated_at           = clock_timestamp();
    update node set incarnation = incarnation + 1000 * passed, expires_at = clock_timestamp();
    perform 1 from coordinator_lease order by kind, shard for update;
    update coordinator_lease
    set lease_epoch = lease_epoch + 1000 * passed, expires_at = '-infinity', successor = null;
    update topic set changed_revision = this_revision where deleted_at is null;
    perform 1 from partition order by partition_key for no key update;
    update partition set leader_epoch = greatest(leader_epoch + 1, this_history);
    insert into partition_epoch (partition_key, leader_epoch, start_offset)
    select partition_key, leader_epoch, next_offset from partition_log;
    perform pg_notify('sluice_revision', this_revision::text);
    return this_history;
end
$$;
