# Use the machine's C++ compiler. LDFLAGS is set by the package of the C compiler, which this package requires.
export CXX="${FORGE_HOST_CXX:-g++}"
export CXXFLAGS="-O2 -isystem ${PREFIX:-$CONDA_PREFIX}/include"
