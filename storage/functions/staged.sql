-- The relay's side of what SQL transactions have staged.

create function take_staged(
    p_xids         bigint[],
    p_seqs         bigint[], -- their places
    p_record_count bigint    -- records that the caller has read and appends
) returns boolean
language plpgsql volatile
set plan_cache_mode = force_generic_plan
-- Postgres may make the plan while the staging tables are empty. The plan must also suit full tables.
set enable_seqscan = off
as $$
-- Delete staged transactions. Their records were read by an earlier statement. If one of these records is gone, another
-- relay has appended it, and this one must not append it again.
declare
    taken bigint;
begin
    delete from staged_record r where r.xid = any (p_xids);
    get diagnostics taken = row_count;
    if taken <> p_record_count then
        raise exception '% staged records were read and % are left', p_record_count, taken using
            errcode = 'SL001',
            hint = 'Another relay has appended them. This one must read the staged transactions again.';
    end if;
    delete from staged_commit c where c.seq = any (p_seqs);
    return true;
end
$$;

create function place_written(
    p_slot         smallint,
    p_positions    bigint[], -- of bytes that this transaction has written before their offsets were known
    p_base_offsets bigint[]
) returns void
language plpgsql volatile
set plan_cache_mode = force_generic_plan
-- Look each row up by the index. The table is never analysed, so the planner might choose a scan.
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
-- Name the chunks that the bytes belong to. Only the row's head is written anew, not the bytes.
begin
    update inline_records r
    set base_offset = placed.base_offset
    from unnest(p_positions, p_base_offsets) placed (position, base_offset)
    where r.slot = p_slot and r.position = placed.position;
end
$$;
