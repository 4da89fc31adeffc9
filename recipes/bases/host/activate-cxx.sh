# Use the machine's C++ compiler. The package of the C compiler, a requirement, sets LDFLAGS.
export CXX="${FORGE_HOST_CXX:-g++}"
export CXXFLAGS="-O2 -isystem ${PREFIX:-$CONDA_PREFIX}/include"
