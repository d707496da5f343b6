-- The journal tells of streams groups (KIP-1071) and share groups (KIP-932), too.
alter table journal_event drop constraint journal_event_group_type_check;
alter table journal_event add constraint journal_event_group_type_check
    check (group_type in ('classic', 'consumer', 'streams', 'share', ''));
