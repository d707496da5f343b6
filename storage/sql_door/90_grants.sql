-- EXECUTE and SELECT belong to two roles, never to PUBLIC: <schema>_writer calls functions and reads, <schema>_reader
-- reads. If the installing role may not create roles, the administrator creates them, and the next start of a node
-- grants them what they need.

revoke all on all functions in schema kafka from public;

do $$
declare
    door_function text;
begin
    for door_function in
        select p.oid::regprocedure::text from pg_proc p join pg_namespace n on n.oid = p.pronamespace
        where n.nspname = 'sluice' and p.proname like 'door\_%'
    loop
        execute 'revoke all on function ' || door_function || ' from public';
    end loop;
end
$$;

do $$
declare
    door_role text;
begin
    foreach door_role in array array[':schema_writer', ':schema_reader'] loop
        if not exists (select from pg_roles r where r.rolname = door_role) then
            begin
                execute format('create role %I nologin', door_role);
            exception when insufficient_privilege or duplicate_object or unique_violation then
                null; -- another database's node has created it, or the administrator must
            end;
        end if;
        continue when not exists (select from pg_roles r where r.rolname = door_role);
        execute format('grant usage on schema kafka to %I', door_role);
        execute format('grant select on all tables in schema kafka to %I', door_role);
        execute format('grant execute on function kafka.may_describe, kafka.records, kafka.wait_for, kafka.flush, '
            'kafka.committed to %I', door_role);
    end loop;
    if exists (select from pg_roles r where r.rolname = ':schema_writer') then
        execute 'grant execute on all functions in schema kafka to :schema_writer';
    end if;
end
$$;
