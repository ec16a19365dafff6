//! Generates the records of the server, which the .proto files in `helix-proto` define.
//!
//! They are generated here, not in `helix-proto`, because no client needs them and the server adds
//! methods to them.

#![expect(clippy::disallowed_methods, reason = "a build script reads files")]

use std::path::Path;
use std::{error, fs};

/// Messages and their `oneof`s that are compared with `Eq`, which the generator leaves out where a
/// field repeats a message.
const EQ: [&str; 7] = [
    "AccessCommandRecord.command",
    "AccessRecord",
    "CreateToken",
    "PrincipalRules",
    "MemberAddresses",
    "ReplicaStatusReport",
    "TopicOffsets",
];

fn main() -> Result<(), Box<dyn error::Error>> {
    let root = Path::new("../helix-proto/proto");
    let directory = root.join("helix/internal/v1");
    println!("cargo:rerun-if-changed={}", directory.display());

    let mut files = Vec::new();
    for entry in fs::read_dir(&directory)? {
        files.push(entry?.path());
    }
    files.sort();
    let mut compiler = protox::Compiler::new([root])?;
    compiler.include_imports(true).include_source_info(true).open_files(files)?;

    let package = ".helix.internal.v1";
    let mut builder = tonic_prost_build::configure()
        // Shares the buffer that the record was read into.
        .bytes(format!("{package}.CheckpointRecord"))
        .bytes(format!("{package}.PeerRequestRecord"))
        // A log must not show the hash of a token.
        .skip_debug([format!("{package}.TokenRecord")]);
    for name in EQ {
        builder = builder.type_attribute(format!("{package}.{name}"), "#[derive(Eq)]");
    }
    builder.compile_fds(compiler.file_descriptor_set())?;
    Ok(())
}
