// libnvrtc.so.12: compiles CUDA C++ to a shared object for this CPU, with the host's compiler.
//
// VGPU_CXX       the compiler (g++)
// VGPU_CXXFLAGS  more of its options, such as -fsanitize=address
//
// The folder "compiled" next to this library has the sources of kernels, and what the compiler says of them.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>
#define API extern "C" __attribute__((visibility("default")))

enum Result { SUCCESS = 0, INTERNAL = 4, COMPILATION = 6, UNSUPPORTED = 9, NO_SUCH_EXPRESSION = 10 };
struct Program {
  std::string source, name, log, binary;
  std::vector<std::string> expressions;        // instances of templates, such as f<float>
  std::map<std::string, std::string> symbols;  // of the expressions
};

static std::string quote(const std::string& s) {
  std::string quoted = "'";
  for (char c : s) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}
static std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}
static int run(const std::string& command) {
  int status = system(command.c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : 255;
}
static bool exists(const std::string& path) { return !access(path.c_str(), R_OK); }
static bool is_set(const char* variable) { return getenv(variable) && *getenv(variable); }
static std::string variable(const char* name, const std::string& missing) {
  return is_set(name) ? getenv(name) : missing;
}

// The folder of this library.
static std::string here() {
  Dl_info info;
  dladdr((void*)&here, &info);
  char path[PATH_MAX];
  if (!realpath(info.dli_fname, path)) abort();
  return std::string(path, strrchr(path, '/'));
}
// A folder in it, with a slash.
static std::string folder(const std::string& name) {
  std::string path = here() + "/" + name;
  mkdir(path.c_str(), 0755);
  return path + "/";
}

struct Options {
  std::string compiler = variable("VGPU_CXX", "g++");
  std::string flags;
  std::string cupy_include;  // the folder of CuPy's headers
};

// The value of an option that is spelled -Xvalue, -X value or --long=value.
static bool is_option(const std::string& option, const char* name, std::string* value) {
  if (option.compare(0, strlen(name), name)) return false;
  *value = option.substr(strlen(name));
  return true;
}

// Translates NVRTC's options.
static Options translate(int n, const char** given) {
  Options options;
  std::string standard = "17", folders, defines, value;
  for (int i = 0; i < n; ++i) {
    std::string option = given[i];
    if (option == "-I" || option == "-D") option += given[++i];
    if (is_option(option, "-I", &value) || is_option(option, "--include-path=", &value)) {
      if (exists(value + "/cupy/carray.cuh")) options.cupy_include = value;
      // The stand-ins replace CUDA's headers. CCCL's device code needs CUDA's compiler.
      if (value.find("/_cccl/") == std::string::npos && !exists(value + "/cuda_runtime_api.h"))
        folders += " -I" + quote(value);
    } else if (is_option(option, "-D", &value) || is_option(option, "--define-macro=", &value)) {
      defines += " -D" + quote(value);
    } else if (is_option(option, "-std=c++", &value) || is_option(option, "--std=c++", &value)) {
      if (value != "11" && value != "14") standard = value;
    }
  }
  options.flags =
      "-O1 -fPIC -w -fpermissive -fno-strict-aliasing -fno-gnu-unique -fvisibility=hidden "
      "-ffp-contract=off -std=gnu++" +
      standard + " -I" + quote(here() + "/kernel_include") + folders + defines + " " +
      variable("VGPU_CXXFLAGS", "");
  return options;
}

// CuPy's headers, precompiled with these options once. Returns the header's path, or nothing if that fails.
static std::string precompiled_header(const Options& options) {
  size_t key = std::hash<std::string>()(options.compiler + options.flags);
  std::string base = folder("precompiled") + std::to_string(key), header = base + ".h";
  if (exists(header + ".gch")) return header;
  std::string mine = base + "." + std::to_string(getpid());
  {
    std::ofstream file(mine + ".h");
    file << "#include <vgpu_kernel.h>\n#include <cuda_fp16.h>\n";
    if (!options.cupy_include.empty())
      for (std::string name : {"complex.cuh", "carray.cuh", "atomics.cuh", "math_constants.h", "float16.cuh"})
        if (exists(options.cupy_include + "/cupy/" + name)) file << "#include <cupy/" << name << ">\n";
  }
  std::string command =
      options.compiler + " " + options.flags + " -x c++-header -o " + quote(mine + ".gch") + " ";
  if (run(command + quote(mine + ".h"))) return "";
  rename((mine + ".h").c_str(), header.c_str());
  rename((mine + ".gch").c_str(), (header + ".gch").c_str());
  return header;
}

// Finds the names of kernels that have no template parameters, of which C++ sees no instance otherwise.
static std::set<std::string> kernels_of(const std::string& source) {
  static const std::string bounds = R"((?:__launch_bounds__\s*\([^)]*\)\s*)?)";
  static const std::regex kernel("(extern\\s+\"C\"\\s+)?" + bounds + "(?:static\\s+)?__global__\\s+" +
                                 bounds + "void\\s+" + bounds + "(\\w+)\\s*\\(");
  static const std::regex c_block("extern\\s+\"C\"\\s*\\{"), template_before(R"(template\s*<[^;{}]*>\s*$)");
  bool has_c_block = std::regex_search(source, c_block);
  std::set<std::string> names;
  for (std::sregex_iterator i(source.begin(), source.end(), kernel), end; i != end; ++i) {
    size_t start = i->position();
    std::string before = source.substr(start > 300 ? start - 300 : 0, std::min<size_t>(start, 300));
    bool is_c = (*i)[1].matched || (has_c_block && !std::regex_search(before, template_before));
    if (is_c) names.insert((*i)[2]);
  }
  return names;
}

// What the host's compiler gets: the source, and a description of each kernel.
static std::string host_source(Program* p) {
  // Dynamic shared memory: extern __shared__ T name[];
  static const std::regex dynamic_shared(
      R"(extern\s+__shared__\s+((?:__align__\s*\(\s*\d+\s*\)\s+)?)([A-Za-z_][\w:<> ]*?)\s*(\w+)\s*\[\s*\]\s*;)");
  static const std::regex waits(R"(__sync|__shfl|__ballot|__any_sync|__all_sync|cooperative_groups|cub::)");
  // NVRTC has no stdint.h, so kernels define its types; on this host, uint64_t is another type.
  static const std::regex integer_type(R"(typedef\s+[\w ]+?\s+u?int(?:8|16|32|64)_t\s*;)");
  std::string source = std::regex_replace(
      p->source, dynamic_shared, "static $2* const $3 = reinterpret_cast<$2*>(vgpu_dynamic_shared);");
  source = std::regex_replace(source, integer_type, "");
  std::string threads_wait = std::regex_search(source, waits) ? "true" : "false";
  std::ostringstream out;
  out << "#line 1 \"" << p->name << "\"\n" << source << "\n";
  for (auto& name : kernels_of(source))
    out << "VGPU_KERNEL(&" << name << ", " << name << ", " << threads_wait << ")\n";
  for (size_t i = 0; i < p->expressions.size(); ++i) {
    std::string symbol = "expression_" + std::to_string(i);
    p->symbols[p->expressions[i]] = symbol;
    out << "VGPU_KERNEL((&" << p->expressions[i] << "), " << symbol << ", " << threads_wait << ")\n";
  }
  out << "extern \"C\" __attribute__((visibility(\"default\"))) void vgpu_init(const vgpu_api* api) { vgpu = "
         "api; }\n";
  return out.str();
}

API int nvrtcCompileProgram(Program* p, int n, const char** given) {
  bool is_empty = p->source.find_first_not_of(" \n") == std::string::npos && p->expressions.empty();
  if (is_empty) {  // CuPy compiles one to see what the headers define
    p->binary = "// empty\n";
    return SUCCESS;
  }
  Options options = translate(n, given);
  std::string header = precompiled_header(options);
  std::string command = options.compiler + " " + options.flags + " -shared -include " +
                        quote(header.empty() ? "vgpu_kernel.h" : header);
  std::string source = host_source(p);
  // Ranks want the same kernels at the same time: one compiles them, and the others take the result.
  std::string base = folder("compiled") + std::to_string(std::hash<std::string>()(command + source));
  int lock = open((base + ".lock").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0644);
  if (lock < 0 || flock(lock, LOCK_EX)) return INTERNAL;
  bool compiled = exists(base + ".so");
  if (!compiled) {
    std::ofstream(base + ".cpp") << source;
    compiled = !run(command + " -o " + quote(base + ".new") + " " + quote(base + ".cpp") + " -lm 2> " +
                    quote(base + ".log")) &&
               !rename((base + ".new").c_str(), (base + ".so").c_str());
  }
  p->log = read(base + ".log");
  p->binary = read(base + ".so");
  close(lock);
  return compiled ? SUCCESS : COMPILATION;
}

API int nvrtcCreateProgram(Program** out, const char* source, const char* name, int, const char**,
                           const char**) {
  *out = new Program{source, name ? name : ""};
  return SUCCESS;
}
API int nvrtcDestroyProgram(Program** p) {
  delete *p;
  *p = nullptr;
  return SUCCESS;
}
API int nvrtcAddNameExpression(Program* p, const char* expression) {
  p->expressions.push_back(expression);
  return SUCCESS;
}
API int nvrtcGetLoweredName(Program* p, const char* expression, const char** out) {
  auto found = p->symbols.find(expression);
  if (found == p->symbols.end()) return NO_SUCH_EXPRESSION;
  *out = found->second.c_str();
  return SUCCESS;
}

// The shared object takes the place of both PTX and CUBIN. PTX and the log end with a null character.
API int nvrtcGetCUBINSize(Program* p, size_t* n) {
  *n = p->binary.size();
  return SUCCESS;
}
API int nvrtcGetCUBIN(Program* p, char* out) {
  memcpy(out, p->binary.data(), p->binary.size());
  return SUCCESS;
}
API int nvrtcGetPTXSize(Program* p, size_t* n) {
  *n = p->binary.size() + 1;
  return SUCCESS;
}
API int nvrtcGetPTX(Program* p, char* out) {
  memcpy(out, p->binary.c_str(), p->binary.size() + 1);
  return SUCCESS;
}
API int nvrtcGetProgramLogSize(Program* p, size_t* n) {
  *n = p->log.size() + 1;
  return SUCCESS;
}
API int nvrtcGetProgramLog(Program* p, char* out) {
  memcpy(out, p->log.c_str(), p->log.size() + 1);
  return SUCCESS;
}
API int nvrtcGetLTOIRSize(Program*, size_t*) { return UNSUPPORTED; }
API int nvrtcGetLTOIR(Program*, char*) { return UNSUPPORTED; }

API int nvrtcVersion(int* major, int* minor) {
  *major = 12;
  *minor = 9;
  return SUCCESS;
}
API int nvrtcGetNumSupportedArchs(int* n) {
  *n = 1;
  return SUCCESS;
}
API int nvrtcGetSupportedArchs(int* architectures) {
  *architectures = 90;
  return SUCCESS;
}
API const char* nvrtcGetErrorString(int error) {
  return error == SUCCESS       ? "NVRTC_SUCCESS"
         : error == COMPILATION ? "NVRTC_ERROR_COMPILATION"
                                : "NVRTC_ERROR";
}
