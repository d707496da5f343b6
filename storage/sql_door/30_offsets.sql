-- Offsets: kafka.commit_offset and kafka.committed.

create or replace function sluice.door_shard(p_group_id text) returns integer
language plpgsql immutable strict
as $$
-- The shard of a group: Java's String.hashCode over UTF-16 units, made positive, modulo the number of shards
-- (gateway/cluster/leases.py).
declare
    code  bigint := 0;
    point integer;
begin
    for i in 1..length(p_group_id) loop
        point := ascii(substr(p_group_id, i, 1));
        if point >= 65536 then
            code := (31 * code + 55296 + ((point - 65536) >> 10)) & 4294967295;
            point := 56320 + ((point - 65536) & 1023);
        end if;
        code := (31 * code + point) & 4294967295;
    end loop;
    if code >= 2147483648 then
        code := 4294967296 - code;
    end if;
    return case when code = 2147483648 then 0 else code % :shards end;
end
$$;

create or replace function sluice.door_fence(p_group_id text, p_generation_id integer, p_member_id text) returns text
language plpgsql stable
set search_path = sluice, pg_temp
as $$
-- Return why the group refuses a commit, or null. The rules are those of OffsetCommit. If the caller holds the lock of
-- the group's row, the answer holds until its transaction ends.
declare
    held         consumer_group;
    member_epoch integer;
    member_known boolean;
begin
    select g.* into held from consumer_group g where g.group_id = p_group_id;
    if not found then
        return case when p_generation_id is not null or p_member_id is not null then 'the group does not exist' end;
    end if;
    if held.group_type = 'share' then
        return 'a share group has no committed offsets';
    end if;
    if p_generation_id is null and p_member_id is null then
        return case when exists (select from group_member m where m.group_id = p_group_id)
            then 'the group has members, and the commit names no generation and member' end;
    end if;
    if p_generation_id is null or p_member_id is null then
        return 'a commit names both generation and member, or neither';
    end if;
    select m.member_epoch into member_epoch
    from group_member m where m.group_id = p_group_id and m.member_id = p_member_id;
    member_known := found;
    if not member_known then
        return format('member %s is not in the group', p_member_id);
    end if;
    if held.group_type = 'classic' then
        return case
            when held.generation_id <> p_generation_id
                then format('the group is at generation %s, not %s', held.generation_id, p_generation_id)
            when held.state = 'CompletingRebalance' then 'the group is rebalancing' end;
    end if;
    return case when member_epoch <> p_generation_id
        then format('member %s is at epoch %s, not %s', p_member_id, member_epoch, p_generation_id) end;
end
$$;

create or replace function sluice.door_refusal_code(p_why text) returns integer
language sql immutable
as $$
-- Kafka's error code for a refusal of door_fence.
    select case
        when p_why like 'the group is at generation %' then 22
        when p_why = 'the group is rebalancing' then 27
        when p_why = 'the group does not exist' then 69
        when p_why = 'a share group has no committed offsets' then 24
        when p_why = 'the topic has been deleted' then 3
        when p_why like 'member % is at epoch %' and p_why not like '% is not in the group' then 113
        else 25 end
$$;

create or replace function sluice.door_note_refusal(
    p_group_id text, p_topic_id uuid, p_partition integer, p_offset bigint, p_generation_id integer, p_member_id text,
    p_why text
) returns void
language plpgsql volatile
set search_path = sluice, pg_temp
as $$
-- Note a fenced commit for the journal, in sequences, because the error will roll back everything else. The number of
-- the slot is written last: a reader that finds it has all fields.
declare
    number constant bigint := nextval('sluice.refused_commit');
    slot   constant text := 'sluice.refused_commit_' || number % 16 || '_';
begin
    perform setval((slot || 'number')::regclass, 0),
        setval((slot || 'group_hash')::regclass, hashtextextended(p_group_id, 0)),
        setval((slot || 'member_hash')::regclass, coalesce(hashtextextended(p_member_id, 0), 0)),
        setval((slot || 'partition_key')::regclass, coalesce((
            select p.partition_key from partition p where p.topic_id = p_topic_id and p.partition_index = p_partition
        ), 0)),
        setval((slot || 'offset')::regclass, p_offset),
        setval((slot || 'role_generation')::regclass,
            coalesce((select r.oid::bigint from pg_roles r where r.rolname = door_role()), 0) << 32
            | (coalesce(p_generation_id, -1)::bigint & 4294967295)),
        setval((slot || 'time_code')::regclass,
            (extract(epoch from clock_timestamp()) * 1000)::bigint << 8 | door_refusal_code(p_why)),
        setval((slot || 'number')::regclass, number);
end
$$;

drop function if exists sluice.door_refuse_fenced(text, text, integer, bigint, text);

create or replace function sluice.door_refuse_fenced(
    p_group_id text, p_topic_id uuid, p_topic text, p_partition integer, p_offset bigint, p_generation_id integer,
    p_member_id text, p_why text
) returns void
language plpgsql volatile
set search_path = sluice, pg_temp
as $$
begin
    perform door_note_refusal(p_group_id, p_topic_id, p_partition, p_offset, p_generation_id, p_member_id, p_why);
    raise exception using
        errcode = 'SL001',
        message = format('group %s: the commit of offset %s for %s-%s is fenced: %s', p_group_id, p_offset, p_topic, p_partition, p_why),
        hint = 'Discard the work, and continue from the committed offset with the consumer''s present generation and member id.';
end
$$;

create or replace function sluice.door_commit_offsets() returns trigger
language plpgsql security definer
set search_path = sluice, pg_temp
set standard_conforming_strings = on
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
-- Write all staged offsets of the transaction while it commits. A node moves their rows to the journal later, because the
-- journal's writers wait for each other. The groups' rows are locked in the order in which every
-- writer locks them, so a new generation waits for the rest of this commit, and not for the work before it.
declare
    context  text;
    staged   record;
    why      text;
    now_ms   bigint;
begin
    if new.xid <> pg_current_xact_id()::text::bigint then
        return null; -- a replica of the table receives the row of a transaction on another server
    end if;
    perform 1 from staged_offset s
    where s.xid = new.xid and s.position = new.position and s.committed_ms is null and not exists (
        select from staged_offset b where b.xid = new.xid and b.position < new.position and b.committed_ms is null);
    if not found then
        return null; -- the trigger of the first row writes all of them
    end if;
    get diagnostics context = pg_context;
    -- At its first run, the trigger queues itself behind the other deferred triggers of the transaction. They may wait for
    -- a lock, and a rebalance must not wait with them.
    if new.fired_at is null or door_may_be_early(context, new.fired_at) then
        set constraints sluice.staged_offset_commits deferred;
        update staged_offset s
        set fired_at = greatest(s.fired_at + interval '1 microsecond', statement_timestamp())
        where s.xid = new.xid and s.position = new.position;
        return null;
    end if;
    perform door_refuse_prepare();
    now_ms := (extract(epoch from clock_timestamp()) * 1000)::bigint;
    loop
        insert into consumer_group (group_id, shard, group_type, state, state_timestamp_ms, generation_id, document)
        select distinct s.group_id, door_shard(s.group_id), 'classic', 'Empty', now_ms, 0, '{}'::jsonb
        from staged_offset s
        where s.xid = new.xid and s.committed_ms is null and s.generation_id is null
            and not exists (select from consumer_group g where g.group_id = s.group_id)
        order by s.group_id
        on conflict (group_id) do nothing;
        perform 1 from consumer_group g
        where g.group_id in (select s.group_id from staged_offset s where s.xid = new.xid and s.committed_ms is null)
        order by g.group_id for share;
        -- The lock may have waited for a transaction that removed a group without members. Such a group begins anew.
        perform 1 from staged_offset s
        where s.xid = new.xid and s.committed_ms is null and s.generation_id is null
            and not exists (select from consumer_group g where g.group_id = s.group_id);
        exit when not found;
    end loop;
    for staged in
        select s.*, t.name as topic
        from staged_offset s left join topic t on t.topic_id = s.topic_id and t.deleted_at is null
        where s.xid = new.xid and s.committed_ms is null order by s.position
    loop
        why := case when staged.topic is null then 'the topic has been deleted'
            else door_fence(staged.group_id, staged.generation_id, staged.member_id) end;
        if why is not null then
            perform door_refuse_fenced(
                staged.group_id, staged.topic_id, coalesce(staged.topic, staged.topic_id::text), staged.partition_index,
                staged.committed_offset, staged.generation_id, staged.member_id, why);
        end if;
    end loop;
    insert into committed_offset as o (
        group_id, topic_id, partition_index, committed_offset, leader_epoch, metadata, commit_timestamp_ms,
        expire_timestamp_ms
    )
    select distinct on (s.group_id, s.topic_id, s.partition_index)
        s.group_id, s.topic_id, s.partition_index, s.committed_offset, -1, s.metadata, now_ms, null
    from staged_offset s
    where s.xid = new.xid and s.committed_ms is null
    order by s.group_id, s.topic_id, s.partition_index, s.position desc
    on conflict (group_id, topic_id, partition_index) do update set
        committed_offset    = excluded.committed_offset,
        leader_epoch        = excluded.leader_epoch,
        metadata            = excluded.metadata,
        commit_timestamp_ms = excluded.commit_timestamp_ms,
        expire_timestamp_ms = excluded.expire_timestamp_ms;
    update staged_offset s set committed_ms = now_ms where s.xid = new.xid and s.committed_ms is null;
    return null;
end
$$;

do $$
-- To create a trigger waits for every transaction that has written to the table, and those behind wait for it. So a node
-- that replaces the functions leaves the trigger alone.
begin
    if not exists (select from pg_trigger t where t.tgrelid = 'sluice.staged_offset'::regclass and t.tgname = 'staged_offset_commits') then
        create constraint trigger staged_offset_commits
            after insert or update of fired_at on sluice.staged_offset
            deferrable initially deferred
            for each row execute function sluice.door_commit_offsets();
        alter table sluice.staged_offset enable always trigger staged_offset_commits;
    end if;
end
$$;

create or replace function kafka.commit_offset(
    "group"      text,
    topic        text,
    partition    integer,
    "offset"     bigint,
    metadata     text default '',
    generation   integer default null,
    member       text default null
) returns void
language plpgsql volatile security definer parallel unsafe
set search_path = sluice, pg_temp
set plan_cache_mode = force_generic_plan
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
#variable_conflict use_column
-- Commit the offset together with the caller's transaction. A fenced commit fails here if the fence is already visible,
-- and otherwise when the transaction commits.
declare
    target record;
    why    text;
begin
    if commit_offset."group" is null or commit_offset.topic is null or commit_offset.partition is null
        or commit_offset."offset" is null
    then
        raise exception using
            errcode = '22004',
            message = 'group, topic, partition and offset of a commit must not be NULL',
            hint = 'Call commit_offset(group, topic, partition, offset), with the offset of the next record to read.';
    end if;
    if commit_offset."group" = '' or octet_length(commit_offset."group") > 1024 or commit_offset."offset" < 0
        or octet_length(commit_offset.metadata) > 4096
    then
        raise exception using
            errcode = '22023',
            message = format('group %s, topic %s: the group must have 1 to 1024 bytes, the offset must not be negative, and '
                'metadata must not exceed 4096 bytes', left(commit_offset."group", 100), commit_offset.topic),
            hint = format('The offset is %s, and metadata has %s bytes.', commit_offset."offset",
                coalesce(octet_length(commit_offset.metadata), 0));
    end if;
    perform door_require(3, 3, commit_offset."group");
    perform door_require(3, 2, commit_offset.topic);
    select t.topic_id, p.partition_index into target
    from topic t left join partition p
        on p.topic_id = t.topic_id and p.partition_index = commit_offset.partition and not p.deleted
    where t.name = commit_offset.topic and t.deleted_at is null;
    if target.partition_index is null then
        raise exception using
            errcode = '42704',
            message = format('group %s: partition %s-%s does not exist', commit_offset."group", commit_offset.topic, commit_offset.partition),
            hint = 'Commit an offset of a partition that the consumer has read.';
    end if;
    why := door_fence(commit_offset."group", commit_offset.generation, commit_offset.member);
    if why is not null then
        perform door_refuse_fenced(
            commit_offset."group", target.topic_id, commit_offset.topic, commit_offset.partition, commit_offset."offset",
            commit_offset.generation, commit_offset.member, why);
    end if;
    insert into staged_offset (
        xid, group_id, topic_id, partition_index, committed_offset, metadata, member_id, generation_id, role_name
    ) values (
        pg_current_xact_id()::text::bigint, commit_offset."group", target.topic_id, target.partition_index,
        commit_offset."offset", coalesce(commit_offset.metadata, ''), commit_offset.member, commit_offset.generation,
        door_role()
    );
end
$$;

create or replace function kafka.committed("group" text)
returns table (topic text, partition integer, "offset" bigint, metadata text, committed_at timestamptz)
language plpgsql stable security definer parallel unsafe
set search_path = sluice, pg_temp
as $$
#variable_conflict use_column
-- The committed offsets of the group, in the order of topic and partition.
begin
    perform door_require(8, 3, committed."group");
    return query
        select t.name::text, o.partition_index, o.committed_offset, o.metadata, to_timestamp(o.commit_timestamp_ms / 1000.0)
        from committed_offset o join topic t on t.topic_id = o.topic_id and t.deleted_at is null
        where o.group_id = committed."group" and door_allows(8, 2, t.name)
        order by t.name, o.partition_index;
end
$$;
