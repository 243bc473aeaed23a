#include "settings.h"
#include <cstdio>
#include <cstdlib>
#include <string>

namespace virtual_gpu {
static std::string variable(const char* name, const char* missing) {
  const char* value = getenv(name);
  return value && *value ? value : missing;
}

static Mode mode_of(const std::string& name) {
  if (name == "eager") return EAGER;
  if (name == "lazy") return LAZY;
  if (name == "random") return RANDOM;
  fprintf(stderr, "VGPU_MODE is '%s'; choose eager, lazy or random\n", name.c_str());
  exit(2);
}

Settings read_settings() {
  Settings s;
  s.mode = mode_of(variable("VGPU_MODE", "eager"));
  s.seed = std::stoi(variable("VGPU_SEED", "0"));
  s.lag = std::stoi(variable("VGPU_LAG", "20"));
  s.devices = std::stoi(variable("VGPU_DEVICES", "1"));
  s.memory = std::stoull(variable("VGPU_MEMORY", "4294967296"));
  s.poison = variable("VGPU_POISON", "0") == "1";
  s.protect = variable("VGPU_PROTECT", "0") == "1";
  s.trace = variable("VGPU_TRACE", "0") == "1";
  return s;
}
}  // namespace virtual_gpu
