# SPDX-License-Identifier: BSD-3-Clause
# shellcheck shell=bash
# A new attempt finds the objects of an earlier one, whose folder had another name: paths relative to the
# build's folder, the compiler known by its bytes. Depend mode still hashes every header.
export CCACHE_BASEDIR="${SRC_DIR%/*}" CCACHE_NOHASHDIR=1 CCACHE_COMPILERCHECK=content CCACHE_DEPEND=1
export CCACHE_MAXSIZE="${CCACHE_MAXSIZE:-20G}"
export CCACHE_DIR="${FORGE_CACHE:-$SRC_DIR/.cache}/ccache"
