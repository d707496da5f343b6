-- The second phase of a topic's deletion: the rows that belong to a hidden topic are deleted in bounded steps, the
-- topic's own row last. Each step finds its rows by an index, may be repeated, and is safe beside another node that
-- deletes the same rows.

create function fence_partitions(p_topic_id uuid, p_behind integer, p_limit integer) returns integer
language plpgsql volatile
set lock_timeout = '1s'
as $$
-- Mark at most p_limit partitions behind an index (-1: from the first), waiting for appends in progress. From then on
-- no append reaches them, even from a node of another release. Return the last index marked, null if none was left.
declare
    keys bigint[];
    last_index integer;
begin
    select array_agg(doomed.partition_key), max(doomed.partition_index) into keys, last_index
    from (
        select p.partition_key, p.partition_index
        from partition p
        where p.topic_id = p_topic_id and p.partition_index > p_behind
        order by p.partition_index
        limit p_limit
        for no key update
    ) doomed;
    update partition p set deleted = true where p.partition_key = any (keys) and not p.deleted;
    return last_index;
end
$$;

create function delete_partitions(p_partition_keys bigint[]) returns integer
language plpgsql volatile
set lock_timeout = '1s'
as $$
-- Delete those of the fenced partitions to which no row refers; return how many.
declare
    empty bigint[];
    removed integer;
begin
    select array_agg(doomed.partition_key) into empty
    from (
        select p.partition_key
        from partition p
        where p.partition_key = any (p_partition_keys)
            and p.deleted
            and not exists (select from chunk c where c.partition_key = p.partition_key)
            and not exists (select from producer_state s where s.partition_key = p.partition_key)
            and not exists (select from aborted_transaction a where a.partition_key = p.partition_key)
        order by p.partition_key
        for update
    ) doomed;
    delete from compaction_state s where s.partition_key = any (empty);
    delete from open_transaction o where o.partition_key = any (empty);
    delete from partition p where p.partition_key = any (empty);
    get diagnostics removed = row_count;
    return removed;
end
$$;

create function confirm_deletion(p_topic_id uuid) returns boolean
language plpgsql volatile
set lock_timeout = '1s'
as $$
-- Remove the topic's own row once no other row refers to it; return whether it is gone. A node that has not yet heard
-- of the deletion must read the whole catalog from here on. The function does not wait for a commit that refers to the
-- topic; the lock holds off new ones.
declare
    last_change bigint;
begin
    perform 1 from cluster for no key update;
    select t.changed_revision into last_change
    from topic t where t.topic_id = p_topic_id and t.deleted_at is not null
    for update skip locked;
    if not found then
        return not exists (select from topic t where t.topic_id = p_topic_id);
    end if;
    if exists (select from partition p where p.topic_id = p_topic_id)
        or exists (select from committed_offset o where o.topic_id = p_topic_id)
    then
        return false;
    end if;
    delete from topic t where t.topic_id = p_topic_id;
    update cluster set purged_revision = greatest(purged_revision, last_change);
    return true;
end
$$;
