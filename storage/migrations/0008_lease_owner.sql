-- A change of owner waits for those who hold a lease's row FOR KEY SHARE, whichever release makes it: an UPDATE of a
-- column of a unique index locks the row as a DELETE does. A renewal changes none of these, and waits for nobody.

create unique index coordinator_lease_owner on coordinator_lease (kind, shard, node_id, lease_epoch);

comment on index coordinator_lease_owner is
    'For its locks, not for look-ups: it lets writes under a lease and its renewals go on beside each other.';
