fn main() -> std::process::ExitCode {
    kolo::run()
}
