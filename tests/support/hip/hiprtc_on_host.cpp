// libhiprtc.so without an AMD GPU: compiles kernels with the host's C++ compiler to shared objects for the host
// runtime.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "hip_api.h"

namespace {

struct Program {
  std::string source, log, image;
};

std::string readFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::string quoted(const std::string& word) { return "'" + word + "'"; }

// Returns C++ source that defines a symbol `name.kd` for each kernel of a preprocessed source, because code objects
// have such kernel descriptors.
std::string descriptors(const std::string& preprocessed) {
  const std::string word = "__global__";
  std::string made;
  for (size_t at = 0; (at = preprocessed.find(word, at)) != std::string::npos;) {
    const size_t begin = preprocessed.find_last_of(";}", at) + 1;
    const bool is_template = preprocessed.substr(begin, at - begin).find("template") != std::string::npos;
    std::string name = "__";  // the loop skips attributes, whose names begin with "__"
    while (name.compare(0, 2, "__") == 0) {
      at = preprocessed.find('(', at + 1);
      if (at == std::string::npos) return made;
      const size_t last = preprocessed.find_last_not_of(" \n", at - 1);
      const size_t before = preprocessed.find_last_of(" \n*&()", last);
      name = preprocessed.substr(before + 1, last - before);
    }
    if (!is_template) made += "extern \"C\" { __attribute__((used)) char kd_" + name + " asm(\"" + name + ".kd\"); }\n";
  }
  return made;
}

}  // namespace

HIP_EXPORT hiprtcResult hiprtcVersion(int* major, int* minor) {
  *major = 6;
  *minor = 4;
  return HIPRTC_SUCCESS;
}
HIP_EXPORT const char* hiprtcGetErrorString(hiprtcResult result) {
  return result == HIPRTC_SUCCESS ? "HIPRTC_SUCCESS" : "HIPRTC_ERROR";
}
HIP_EXPORT hiprtcResult hiprtcCreateProgram(hiprtcProgram* program, const char* source, const char*, int, const char**,
                                            const char**) {
  return statusOf([&]() -> hiprtcResult {
    *program = new Program{source, "", ""};
    return HIPRTC_SUCCESS;
  });
}
HIP_EXPORT hiprtcResult hiprtcDestroyProgram(hiprtcProgram* program) {
  delete static_cast<Program*>(*program);
  *program = nullptr;
  return HIPRTC_SUCCESS;
}
HIP_EXPORT hiprtcResult hiprtcCompileProgram(hiprtcProgram handle, int count, const char** options) {
  return statusOf([&]() -> hiprtcResult {
    auto* program = static_cast<Program*>(handle);
    char pattern[] = "/tmp/hiprtc_on_host.XXXXXX";
    if (mkdtemp(pattern) == nullptr) return HIPRTC_ERROR_INVALID_INPUT;
    const std::string directory = pattern, source = directory + "/kernel.cpp", image = directory + "/kernel.so",
                      log = directory + "/log";
    std::ofstream(source) << program->source;
    const char* compiler = std::getenv("CXX");
    std::string command = compiler != nullptr ? compiler : "g++";
    for (int i = 0; i < count; ++i)
      if (std::strncmp(options[i], "--offload-arch", 14) != 0) command += " " + quoted(options[i]);
    if (program->source.find("PROXYCCL_EXPORT_KERNEL(") == std::string::npos) {  // compiled to be read
      std::system((command + " -E -DPROXYCCL_FIND_KERNELS " + quoted(source) + " -o " + quoted(log)).c_str());
      std::ofstream(source, std::ios::app) << descriptors(readFile(log));
    }
    // -O0 overrides the caller's -O3, because tests spend more time compiling than running.
    command +=
        " -O0 -fPIC -shared -fvisibility=hidden " + quoted(source) + " -o " + quoted(image) + " 2>" + quoted(log);
    const int status = std::system(command.c_str());
    program->log = readFile(log);
    program->image = readFile(image);
    for (const auto& path : {source, image, log}) unlink(path.c_str());
    rmdir(directory.c_str());
    return status == 0 ? HIPRTC_SUCCESS : HIPRTC_ERROR_COMPILATION;
  });
}
HIP_EXPORT hiprtcResult hiprtcGetProgramLogSize(hiprtcProgram program, size_t* bytes) {
  *bytes = static_cast<Program*>(program)->log.size() + 1;
  return HIPRTC_SUCCESS;
}
HIP_EXPORT hiprtcResult hiprtcGetProgramLog(hiprtcProgram program, char* log) {
  std::strcpy(log, static_cast<Program*>(program)->log.c_str());
  return HIPRTC_SUCCESS;
}
HIP_EXPORT hiprtcResult hiprtcGetCodeSize(hiprtcProgram program, size_t* bytes) {
  *bytes = static_cast<Program*>(program)->image.size();
  return HIPRTC_SUCCESS;
}
HIP_EXPORT hiprtcResult hiprtcGetCode(hiprtcProgram program, char* code) {
  const std::string& image = static_cast<Program*>(program)->image;
  std::memcpy(code, image.data(), image.size());
  return HIPRTC_SUCCESS;
}
