-- Since when no chunk names an object: what a reader found in the index a moment ago is still there.

alter table log_object add column unreferenced_since timestamptz;

comment on column log_object.unreferenced_since is
    'When it was first seen that no chunk names the sealed object, and so none ever will: it is deleted a grace later.';
