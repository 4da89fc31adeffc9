# SPDX-License-Identifier: BSD-3-Clause
# shellcheck shell=bash
# Make a view of conda's GCC in the layout that clang expects. Clang looks for GCC's headers, GCC's libraries and ld
# relative to libgcc's folder, but conda has these files elsewhere. The view is a folder of links to them. With the
# option --gcc-install-dir=VIEW, the HIP compiler uses the same libstdc++ and the same linker as $CXX.

gcc_target=$("$CXX" -dumpmachine) gcc_version=$("$CXX" -dumpfullversion)
gcc_view="$SRC_DIR/gcc/lib/gcc/$gcc_target/$gcc_version"

make_gcc_view() {
    local root="$SRC_DIR/gcc/$gcc_target"
    mkdir -p "$gcc_view" "$root/include/c++"
    ln -sfn "$(dirname "$("$CXX" -print-libgcc-file-name)")"/* "$gcc_view"
    ln -sfn "$(header_folder vector)" "$root/include/c++/$gcc_version"
    ln -sfn "$(dirname "$("$CXX" -print-prog-name=ld)")" "$root/bin"
    ln -sfn "$(dirname "$("$CXX" -print-file-name=libstdc++.so)")" "$root/lib"
}

# header_folder NAME: print the folder in which $CXX finds the header NAME of its C++ library
header_folder() {
    local -a files
    read -ra files < <(echo "#include <$1>" | "$CXX" -x c++ -M - | tr -d '\\\n')
    for file in "${files[@]}"; do
        [[ $file == */$1 ]] && dirname "$file" && return
    done
    echo "$CXX does not find <$1>" >&2 && return 1
}
