-- Sizes of the headers that SQL transactions have staged, and places of transactions in sessions of a replica.

alter table staged_record add column header_bytes bigint;

comment on column staged_record.header_bytes is
    'Bytes of the headers as text, so that the relay need not expand them to measure a transaction. Null: no headers, or staged by an earlier release.';

do $$
-- By default no trigger fires in a session with session_replication_role = replica, such as one that applies the changes
-- of a publication. A trigger of the user may produce there. An installation of the SQL door creates these two triggers.
declare
    made record;
begin
    for made in
        select t.tgrelid::regclass as captured, t.tgname
        from pg_trigger t
        where t.tgrelid in ('staged_record'::regclass, 'staged_offset'::regclass) and not t.tgisinternal
    loop
        execute format('alter table %s enable always trigger %I', made.captured, made.tgname);
    end loop;
end
$$;
