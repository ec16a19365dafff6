//! Compiles the .proto files in pure Rust, so that no protoc has to be installed.
//!
//! Writes the types and services, and a descriptor set without comments for reflection.

#![expect(clippy::disallowed_methods, reason = "a build script reads and writes files")]

use std::path::{Path, PathBuf};
use std::{env, error, fs, io};

use prost::Message;

fn main() -> Result<(), Box<dyn error::Error>> {
    let root = Path::new("proto");
    let mut compiler = protox::Compiler::new([root])?;
    compiler.include_imports(true).include_source_info(true);
    // The server generates the records of `helix/internal`, which only it uses.
    for directory in ["helix/log", "helix/raft"].map(|directory| root.join(directory)) {
        println!("cargo:rerun-if-changed={}", directory.display());
        compiler.open_files(proto_files(&directory)?)?;
    }
    let mut descriptors = compiler.file_descriptor_set();

    tonic_prost_build::configure()
        .bytes(".")
        .codec_path("crate::codec::Codec")
        // Keeps the records serialized, to bound the memory of a request.
        .extern_path(".helix.log.v1.RecordList", "crate::plain::PlainRecords")
        .build_client(true)
        .build_server(true)
        .compile_fds(descriptors.clone())?;

    // The protocol between nodes is not public.
    descriptors.file.retain(|file| !file.name().starts_with("helix/raft/"));
    // Reflection needs names and numbers; the comments would triple its size.
    for file in &mut descriptors.file {
        file.source_code_info = None;
    }
    let out_dir = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out_dir.join("helix_descriptor.bin"), descriptors.encode_to_vec())?;
    Ok(())
}

/// Returns every .proto file below `directory`, sorted.
fn proto_files(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            files.extend(proto_files(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "proto") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}
