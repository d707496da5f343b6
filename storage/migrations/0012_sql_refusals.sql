-- Commits of offsets from SQL that were fenced. A fenced commit raises an error, which rolls back every row of its
-- transaction. Changes of sequences are not rolled back, so a ring of sequences keeps the newest refusals.

create sequence refused_commit;

comment on sequence refused_commit is
    'Numbers of fenced commits from SQL. Number n lies in slot n % 16 of the ring: the sequences refused_commit_<slot>_<field>. `number` is written last. `group_hash` and `member_hash` are hashtextextended(name, 0). `role_generation` has the role''s oid in its upper half, `time_code` the time in ms above eight bits of Kafka''s error code.';

do $$
declare
    field text;
begin
    for slot in 0..15 loop
        foreach field in array
            array['group_hash', 'member_hash', 'partition_key', 'offset', 'role_generation', 'time_code', 'number']
        loop
            execute format(
                'create sequence refused_commit_%s_%s minvalue -9223372036854775808 start 0', slot, field);
        end loop;
    end loop;
end
$$;

alter table sql_door add column refusals_journaled bigint not null default 0;

comment on column sql_door.refusals_journaled is 'The last number of refused_commit that a node has moved to the journal.';
