-- EXECUTE belongs to roles that the administrator gives it to, never to PUBLIC.

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
