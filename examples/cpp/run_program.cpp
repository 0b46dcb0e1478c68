// Runs a file that amp_script.save wrote, from C++ and with nothing but libtorch.
//
//   run_program MODEL.pt INPUTS.pt OUTPUTS.pt [RUNS]
//
// INPUTS.pt holds a tuple or list of arguments, written in Python by torch.save((x, y), "INPUTS.pt").
// OUTPUTS.pt receives what the last run returned; torch.load(..., weights_only=False) reads it. All
// runs must agree to the bit, because the casts are in the program: no first run differs.

#include <chrono>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/script.h>

namespace {

std::vector<char> read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw std::runtime_error("cannot read " + path);
  }
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void write_file(const std::string& path, const std::vector<char>& content) {
  std::ofstream file(path, std::ios::binary);
  file.write(content.data(), static_cast<std::streamsize>(content.size()));
  if (!file) {
    throw std::runtime_error("cannot write " + path);
  }
}

std::vector<torch::IValue> arguments(const torch::IValue& inputs) {
  if (inputs.isTuple()) {
    const auto& elements = inputs.toTupleRef().elements();
    return std::vector<torch::IValue>(elements.begin(), elements.end());
  }
  if (inputs.isList()) {
    return inputs.toListRef().vec();
  }
  throw std::runtime_error("INPUTS.pt must hold a tuple or a list");
}

int run(const std::string& model, const std::string& inputs, const std::string& outputs, int runs) {
  // Without this autograd would record each call.
  const torch::InferenceMode guard;

  torch::jit::ExtraFilesMap extra_files{{"amp_script.json", ""}};
  torch::jit::Module program = torch::jit::load(model, torch::kCPU, extra_files);
  std::cout << extra_files.at("amp_script.json") << '\n';

  const std::vector<torch::IValue> given = arguments(torch::jit::pickle_load(read_file(inputs)));
  std::vector<char> result;
  for (int number = 1; number <= runs; ++number) {
    const auto start = std::chrono::steady_clock::now();
    const torch::IValue output = program.forward(given);
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    std::cout << "run " << number << ": " << took.count() << " ms\n";

    std::vector<char> bytes = torch::jit::pickle_save(output);
    if (number > 1 && bytes != result) {
      throw std::runtime_error("run " + std::to_string(number) + " differs from the one before");
    }
    result = std::move(bytes);
  }
  write_file(outputs, result);
  return EXIT_SUCCESS;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::cerr << "usage: run_program MODEL.pt INPUTS.pt OUTPUTS.pt [RUNS]\n";
    return 2;
  }
  try {
    return run(argv[1], argv[2], argv[3], argc > 4 ? std::stoi(argv[4]) : 3);
  } catch (const c10::Error& error) {
    std::cerr << "error: " << error.what_without_backtrace() << '\n';
    return EXIT_FAILURE;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << '\n';
    return EXIT_FAILURE;
  }
}
