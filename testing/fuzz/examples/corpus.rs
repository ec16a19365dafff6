//! Unpacks the fuzz corpus to a directory, or packs it again:
//! `cargo run -p helix-fuzz --example corpus -- unpack|pack DIR`.

use std::path::Path;
use std::process::ExitCode;

use helix_fuzz::corpus;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let done = match &arguments[..] {
        [command, directory] if command == "unpack" => corpus::unpack(Path::new(directory)),
        [command, directory] if command == "pack" => corpus::pack(Path::new(directory)),
        _ => {
            eprintln!("usage: corpus unpack|pack DIR");
            return ExitCode::from(2);
        }
    };
    if let Err(error) = done {
        eprintln!("{error}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
