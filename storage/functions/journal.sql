-- The journal's numbers and partitions. docs/journal.md says who calls them and when.

create function journal_reserve(p_count bigint) returns bigint
language sql volatile
as $$
-- Return the first of p_count numbers for rows that this transaction inserts. Other writers wait until it has ended.
    update journal_position set next_seq = next_seq + p_count returning next_seq - p_count
$$;

create function journal_make_partitions(p_days_ahead integer) returns integer
language plpgsql volatile
as $$
-- Create the missing partitions of today (UTC) and the days ahead, and return how many were created. A partition is
-- created apart and then attached, so that it does not block writers and readers.
declare
    parent text;
    day date;
    child text;
    made integer := 0;
begin
    perform pg_advisory_xact_lock(5364219801234502);
    foreach parent in array
        array['journal_event', 'journal_member', 'journal_ownership', 'journal_offset', 'journal_handoff']
    loop
        for i in 0 .. p_days_ahead loop
            day := (now() at time zone 'UTC')::date + i;
            child := parent || to_char(day, '"_"YYYYMMDD');
            if to_regclass(quote_ident(current_schema()) || '.' || quote_ident(child)) is not null then
                continue;
            end if;
            execute format('create table %I (like %I including defaults including constraints including comments)', child, parent);
            execute format(
                'alter table %I attach partition %I for values from (%L) to (%L)',
                parent, child, day::text || ' 00:00:00+00', (day + 1)::text || ' 00:00:00+00'
            );
            made := made + 1;
        end loop;
    end loop;
    return made;
end
$$;

create function journal_retain(p_retention_ms bigint, p_retention_bytes bigint) returns integer
language plpgsql volatile
as $$
-- Drop the partitions all of whose rows were written more than p_retention_ms ago, and the oldest days while all days
-- together take more than p_retention_bytes (-1: no bound). Return how many days were dropped. first_seq rises in the
-- same transaction. The position is locked first, as a writer does, so that the two cannot deadlock. A reader such as
-- pg_dump may lock a day for hours, and every writer would then wait behind this statement. So if a day is still locked
-- after a moment, this day and the later ones are left to a later call.
declare
    parent text;
    day date;
    child text;
    last_seq bigint;
    newest_of_day bigint;
    newest_dropped bigint := 0;
    dropped integer := 0;
    day_bytes bigint;
    all_bytes bigint;
    is_old boolean;
begin
    perform pg_advisory_xact_lock(5364219801234502);
    perform 1 from journal_position for update;
    perform set_config('lock_timeout', '100ms', true);
    select coalesce(sum(pg_total_relation_size(i.inhrelid)), 0)
    into all_bytes
    from pg_inherits i
    where i.inhparent in (
        'journal_event'::regclass, 'journal_member'::regclass, 'journal_ownership'::regclass,
        'journal_offset'::regclass, 'journal_handoff'::regclass
    );
    for day, is_old in
        select d.day, p_retention_ms >= 0
            and ((d.day + 1)::timestamp at time zone 'UTC') <= now() - p_retention_ms * interval '1 millisecond'
        from pg_inherits i join pg_class c on c.oid = i.inhrelid,
            lateral (select to_date(right(c.relname, 8), 'YYYYMMDD')) d (day)
        where i.inhparent = 'journal_event'::regclass and d.day <= (now() at time zone 'UTC')::date
        order by d.day
    loop
        exit when not is_old and (p_retention_bytes < 0 or all_bytes <= p_retention_bytes);
        newest_of_day := 0;
        day_bytes := 0;
        begin
            foreach parent in array
                array['journal_event', 'journal_member', 'journal_ownership', 'journal_offset', 'journal_handoff']
            loop
                child := parent || to_char(day, '"_"YYYYMMDD');
                execute format('lock table only %I, %I in access exclusive mode', parent, child);
                execute format('select max(seq) from %I', child) into last_seq;
                day_bytes := day_bytes + pg_total_relation_size(quote_ident(child)::regclass);
                newest_of_day := greatest(newest_of_day, coalesce(last_seq, 0));
                execute format('drop table %I', child);
            end loop;
        exception when lock_not_available then
            exit;
        end;
        all_bytes := all_bytes - day_bytes;
        newest_dropped := greatest(newest_dropped, newest_of_day);
        dropped := dropped + 1;
    end loop;
    if newest_dropped > 0 then
        update journal_position set first_seq = greatest(first_seq, newest_dropped + 1);
    end if;
    return dropped;
end
$$;

create function journal_sql_refusals(p_node_id integer) returns bigint
language plpgsql volatile
as $$
-- Move the fenced commits of SQL transactions from the ring of sequences (migrations/0012) to the journal; how many there
-- were. The ring has the newest 16. If there were more, the newest row counts those that were overwritten. Names are
-- looked up by their hashes among the groups and their members, present and recent.
declare
    done     bigint;
    last     bigint;
    seen     bigint := 0;
    slot     text;
    held     record;
    place    record;
    found_group  text;
    found_member text;
    row_seq      bigint;
begin
    last := coalesce(pg_sequence_last_value('refused_commit'), 0);
    select d.refusals_journaled into done from sql_door d;
    if not found or last <= done then
        return 0;
    end if;
    select d.refusals_journaled into done from sql_door d for update;
    for number in greatest(done + 1, last - 15)..last loop
        slot := 'refused_commit_' || number % 16 || '_';
        select
            pg_sequence_last_value((slot || 'group_hash')::regclass) as group_hash,
            pg_sequence_last_value((slot || 'member_hash')::regclass) as member_hash,
            pg_sequence_last_value((slot || 'partition_key')::regclass) as partition_key,
            pg_sequence_last_value((slot || 'offset')::regclass) as committed_offset,
            pg_sequence_last_value((slot || 'role_generation')::regclass) as role_generation,
            pg_sequence_last_value((slot || 'time_code')::regclass) as time_code
        into held;
        -- This is read after the fields: a caller that has begun to overwrite them has changed this number first.
        continue when pg_sequence_last_value((slot || 'number')::regclass) is distinct from number;
        seen := seen + 1;
        select g.group_id into found_group from consumer_group g where hashtextextended(g.group_id, 0) = held.group_hash;
        continue when not found;
        select t.topic_id, t.name, l.partition_index, l.log_start_offset, l.next_offset into place
        from partition_log l join topic t on t.topic_id = l.topic_id where l.partition_key = held.partition_key;
        continue when not found;
        select m.member_id into found_member
        from (
            select m.member_id from group_member m where m.group_id = found_group
            union all
            (select j.member_id from journal_member j where j.group_id = found_group order by j.seq desc limit 10000)
        ) m
        where hashtextextended(m.member_id, 0) = held.member_hash
        limit 1;
        row_seq := journal_reserve(1);
        insert into journal_offset (
            seq, at_ms, node_id, group_id, kind, generation_id, member_id, topic_id, topic, partition, "offset",
            log_start_offset, log_end_offset, error_code, sql_role
        ) values (
            row_seq, held.time_code >> 8, p_node_id, found_group, 'commit', (held.role_generation << 32) >> 32,
            found_member, place.topic_id, place.name, place.partition_index, held.committed_offset,
            place.log_start_offset, place.next_offset, held.time_code & 255,
            pg_get_userbyid((held.role_generation >> 32 & 4294967295)::oid)
        );
    end loop;
    if row_seq is not null and last - done > seen then
        update journal_offset j set commit_count = 1 + last - done - seen where j.seq = row_seq;
    end if;
    update sql_door d set refusals_journaled = last;
    return last - done;
end
$$;
