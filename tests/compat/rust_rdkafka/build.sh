#!/bin/sh
# build.sh BUILD: builds this suite outside of its folder, where cargo may leave its lock file. rdkafka-sys compiles
# the librdkafka that it brings along.
set -eu
build=$1
mkdir -p "$build/source/src"
cp Cargo.toml "$build/source/"
rm -f "$build/source/src/"*.rs
cp -p src/*.rs "$build/source/src/"
cd "$build/source"
RDKAFKA_VERSION=$(sed -n 's/^rdkafka = .*version = "=\([0-9.]*\)".*/\1/p' Cargo.toml)
export RDKAFKA_VERSION
CARGO_TARGET_DIR=$build/target cargo build >&2
