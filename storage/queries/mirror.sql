-- name: begin_mirror
-- Where `sluice mirror` goes on in a partition, or why it cannot.
select * from begin_mirror($1, $2, $3, $4);

-- name: append_mirrored
-- Return null, or the reason why nothing was written.
select append_mirrored($1, $2, $3, $4, $5, $6, $7, $8);
