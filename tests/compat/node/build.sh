#!/bin/sh
# build.sh BUILD SUITE: copies the suite in which it runs and what the Node suites share to BUILD, and installs there
# what the suite's lock file pins, unless that is what is installed.
set -eu
build=$1 suite=$2
mkdir -p "$build/node" "$build/$suite"
cp ../node/*.mjs "$build/node/"
cp ./*.mjs package.json package-lock.json .npmrc "$build/$suite/"
cd "$build/$suite"
cmp -s package-lock.json installed.json && exit
npm ci >&2
cp package-lock.json installed.json
