# The machine's C++ compiler; the C package, which this one needs, sets LDFLAGS.
export CXX="${FORGE_HOST_CXX:-g++}"
export CXXFLAGS="-O2 -isystem ${PREFIX:-$CONDA_PREFIX}/include"
