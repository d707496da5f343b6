#!/bin/sh
# What compose file and testcontainers ask of the official image: a server with the user and the database that
# POSTGRES_USER, POSTGRES_PASSWORD and POSTGRES_DB name, which it makes at its first start.
set -eu
data=/var/lib/postgresql/18/docker
user=${POSTGRES_USER:-postgres}
as_postgres="setpriv --reuid=postgres --regid=postgres --clear-groups"
if [ ! -s "$data/PG_VERSION" ]; then
  install -d -o postgres -g postgres "$data"
  chmod 700 "$data"
  printf '%s\n' "$POSTGRES_PASSWORD" >/tmp/password
  chown postgres /tmp/password
  $as_postgres initdb --pgdata="$data" --username="$user" --pwfile=/tmp/password --auth-host=scram-sha-256 \
    --auth-local=trust --encoding=UTF8 --locale=C
  rm /tmp/password
  echo "host all all all scram-sha-256" >>"$data/pg_hba.conf"
  printf 'CREATE DATABASE "%s"\n' "${POSTGRES_DB:-$user}" | $as_postgres postgres --single -D "$data" postgres
fi
exec $as_postgres postgres -D "$data" -c listen_addresses='*' -c unix_socket_directories=/tmp
