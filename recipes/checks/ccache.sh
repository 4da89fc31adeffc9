# SPDX-License-Identifier: BSD-3-Clause
# shellcheck shell=bash
# Configure ccache so that a build finds the objects of an earlier build in a folder with another name. Paths are
# relative to the build's folder. The compiler is identified by its content. In depend mode, ccache skips the
# preprocessor, but still hashes all headers.
export CCACHE_BASEDIR="${SRC_DIR%/*}" CCACHE_NOHASHDIR=1 CCACHE_COMPILERCHECK=content CCACHE_DEPEND=1
export CCACHE_MAXSIZE="${CCACHE_MAXSIZE:-20G}"
export CCACHE_DIR="${FORGE_CACHE:-$SRC_DIR/.cache}/ccache"
