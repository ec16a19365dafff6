//! Starts that fail: exit code 2 for invalid flags, 1 for other errors. Each message names the
//! problem and a way out.

// Tests change directories that are not open.
#![allow(clippy::disallowed_methods)]

use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use helix_proto::address::UNIX_PATH_FIELD_BYTES;
use tokio::process::Command;

use crate::process::{self, free_address};
use crate::support::{PATIENCE, soon};

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_helix-server"));
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
    command.env("HELIX_TOPIC", "default:4");
    command
}

/// Returns the exit code and the output.
async fn fails(arguments: &[&str]) -> (Option<i32>, String) {
    let output = soon(command(arguments).stderr(Stdio::piped()).output()).await.unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[tokio::test]
async fn invalid_flag_is_named_with_valid_values() {
    let many_peers: Vec<String> = (2..40).map(|node| format!("{node}=n:1")).collect();
    let many_peers = many_peers.join(",");
    let long_path = format!("unix:/{}", "p".repeat(UNIX_PATH_FIELD_BYTES - 1));
    let path_limit = format!("{UNIX_PATH_FIELD_BYTES} with the final zero byte");
    let rows: &[(&[&str], &str)] = &[
        (&["--node-id", "0"], "choose a number in 1..=4294967295"),
        (&["--node-id", "one"], "invalid digit"),
        (&["--listen-addr", "nowhere"], "write an IP address and a port"),
        (&["--listen-addr", "192.0.2.1:0"], "--insecure"),
        (&["--listen-addr", "0.0.0.0:0"], "--advertise-addr host:port"),
        (&["--listen-addr", "::1:9092"], "write an IP address and a port"),
        (&["--listen-addr", "127.0.0.1:65000"], "--admin-addr off"),
        (&["--advertise-addr", "n1"], "write it as host:port"),
        (&["--advertise-addr", "::1:9092"], "an IPv6 address must be in brackets"),
        (&["--advertise-addr", "http://n1:9092"], "it must not be a URL"),
        (&["--advertise-addr", "n1:0"], "port 0 cannot be dialed"),
        (&["--advertise-addr", " n1:9092"], "it must not contain blanks"),
        (&["--listen-addr", "unix:/run/h.sock"], "--listen-socket unix:/run/h.sock"),
        (&["--listen-socket", "/run/h.sock"], "write it as unix:PATH"),
        (&["--listen-socket", "unix:h.sock"], "the path must be absolute"),
        (&["--listen-socket", long_path.as_str()], path_limit.as_str()),
        (&["--listen-socket-mode", "0888"], "write permissions in octal"),
        (&["--copy-rate-max", "1000"], "choose at least 1MiB"),
        (&["--cluster-id", ""], "set a name, or omit the flag"),
        (&["--peer-addr", "9192"], "write an IP address and a port"),
        (&["--peer", "n2:9192"], "write id=host:port"),
        (&["--peer", "2=http://n2:9192"], "it must not be a URL"),
        (&["--peer", "0=n2:9192"], "1..=4294967295"),
        (&["--peer", "2=n:1,3=n:1"], "give each node its own"),
        (&["--peer-addr", "127.0.0.1:0", "--peer", "2=n:1"], "choose that port"),
        (&["--peer", many_peers.as_str()], "at most 32 nodes"),
        (&["--storage", "papyrus"], "durable, memory"),
        (&["--topic", "orders"], "write name:partitions"),
        (&["--topic", "orders:0"], "write name:partitions"),
        (&["--topic", "a b:1"], "ASCII letters"),
        (&["--topic", "a:1,a:1"], "give each topic once"),
        (&["--shards", "0"], "choose a number in 1..=64"),
        (&["--shards", "64"], "--memory-limit"),
        (&["--worker-threads", "0"], "non-zero"),
        (&["--segment-bytes", "1MiB"], "choose 16MiB to 1GiB"),
        (&["--segment-bytes", "2GiB"], "choose 16MiB to 1GiB"),
        (&["--segment-bytes", "20000001"], "a multiple of 4KiB"),
        (&["--segment-bytes", "a lot"], "write a number of bytes"),
        (&["--memory-limit", "64MiB"], "choose at least 256MiB"),
        (&["--memory-limit", "-1"], "unexpected argument"),
        (&["--tail-bytes", "1GiB"], "choose less, or --memory-limit"),
        (&["--default-retention-bytes", "x"], "write a number of bytes"),
        (&["--default-retention-bytes", "99999999TiB"], "is more than 18446744073709551615 bytes"),
        (&["--default-retention-time", "5"], "write a duration"),
        (&["--default-retention-time", "500ms"], "write a duration"),
        (&["--default-retention-time", "999999999999d"], "is longer than 213503982d"),
        (&["--no-such-flag", "1"], "unexpected argument"),
    ];
    for (arguments, way_out) in rows {
        let (code, said) = fails(arguments).await;
        // The same before a restart.
        let (checked, problems) = fails(&[arguments, &["--check-config"][..]].concat()).await;
        assert_eq!((checked, &problems), (code, &said), "{arguments:?}");
        assert_eq!(code, Some(2), "{arguments:?}: {said}");
        assert!(said.contains(way_out), "{arguments:?}: no {way_out:?} in {said}");
        let flag = if *way_out == "unexpected argument" { "argument" } else { arguments[0] };
        assert!(said.contains(flag), "it names the flag: {said}");
    }
}

/// Waits until a server responds at the address.
async fn until_serving(address: SocketAddr) {
    let client = process::patient_client(address, 1);
    let answer = async {
        while client.route("default", 0).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(3 * PATIENCE, answer).await.expect("it should answer by now");
}

/// Starts a server on the directory and stops it once it serves.
async fn create_data_dir(node_id: &str, directory: &Path) {
    let address = free_address();
    let mut arguments = process::arguments(address, directory);
    arguments[0] = format!("--node-id={node_id}");
    let server = process::start(&arguments);
    until_serving(address).await;
    process::kill(server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rejects_data_directory_of_another_node() {
    let directory = tempfile::tempdir().unwrap();
    create_data_dir("1", directory.path()).await;
    let shown = directory.path().to_str().unwrap();
    let arguments = ["--node-id=2", "--listen-addr=127.0.0.1:0", "--data-dir", shown];
    let (code, said) = fails(&arguments).await;
    assert_eq!(code, Some(1), "{said}");
    for part in [shown, "of node 1", "this is node 2", "--data-dir", "--node-id 1"] {
        assert!(said.contains(part), "no {part:?} in {said}");
    }
    // The directory still works for its own node.
    create_data_dir("1", directory.path()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rejects_data_directory_of_a_newer_format() {
    let directory = tempfile::tempdir().unwrap();
    create_data_dir("1", directory.path()).await;
    let state = directory.path().join("shard-1/state");
    let mut bytes = fs::read(&state).unwrap();
    // docs/wal-format.md: the minimum reader version, and the checksum over the bytes after it.
    bytes[14..16].copy_from_slice(&9_u16.to_le_bytes());
    let length = u64::from_le_bytes(bytes[16..24].try_into().unwrap());
    let crc = crc32fast::hash(&bytes[12..usize::try_from(length).unwrap()]);
    bytes[8..12].copy_from_slice(&crc.to_le_bytes());
    fs::write(&state, &bytes).unwrap();
    let shown = directory.path().to_str().unwrap();
    let (code, said) = fails(&["--listen-addr=127.0.0.1:0", "--data-dir", shown]).await;
    assert_eq!(code, Some(1), "{said}");
    for part in [shown, "version 9", "newer program", "use the program that wrote it"] {
        assert!(said.contains(part), "no {part:?} in {said}");
    }
    assert_eq!(fs::read(&state).unwrap(), bytes, "the file is unchanged");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rejects_data_directory_or_port_in_use() {
    let directory = tempfile::tempdir().unwrap();
    let address = free_address();
    let server = process::start(&process::arguments(address, directory.path()));
    until_serving(address).await;

    let shown = directory.path().to_str().unwrap();
    let (code, said) = fails(&["--listen-addr=127.0.0.1:0", "--data-dir", shown]).await;
    assert_eq!(code, Some(1), "{said}");
    for part in [shown, "in use by another process", "stop it"] {
        assert!(said.contains(part), "no {part:?} in {said}");
    }

    let taken = address.to_string();
    let (code, said) = fails(&["--storage", "memory", "--listen-addr", &taken]).await;
    assert_eq!(code, Some(1), "{said}");
    for part in [taken.as_str(), "--listen-addr", "stop the process that uses the address"] {
        assert!(said.contains(part), "no {part:?} in {said}");
    }
    let peers = ["--peer=2=127.0.0.1:1", "--peer=3=127.0.0.1:2", "--listen-addr=127.0.0.1:0"];
    let own = ["--storage", "memory", "--peer-addr", taken.as_str()];
    let (code, said) = fails(&[&peers[..], &own[..]].concat()).await;
    assert_eq!(code, Some(1), "{said}");
    for part in [taken.as_str(), "--peer-addr", "other nodes"] {
        assert!(said.contains(part), "no {part:?} in {said}");
    }

    until_serving(address).await;
    process::kill(server).await;
}

/// Runs the server under a limit of open files, as `ulimit` sets it.
fn limited(limit: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("ulimit {limit}; exec \"$0\" \"$@\"")]);
    command.arg(env!("CARGO_BIN_EXE_helix-server")).args(arguments);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    command.env("HELIX_TOPIC", "default:4");
    command
}

#[tokio::test]
async fn too_low_limit_of_open_files_is_refused_with_the_number_that_would_do() {
    let directory = tempfile::tempdir().unwrap();
    let shown = directory.path().to_str().unwrap();
    let arguments =
        ["--listen-addr=127.0.0.1:0", "--admin-addr=off", "--shards=4", "--data-dir", shown];
    let output = soon(limited("-n 200", &arguments).output()).await.unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    let needed = said.split_once("4 shards need ").expect(&said).1;
    let needed: u64 = needed.split(';').next().unwrap().parse().unwrap();
    assert!(said.contains("the limit of 200 open files is too low"), "{said}");
    let made = fs::read_dir(directory.path()).map_or(0, Iterator::count);
    assert_eq!(made, 0, "nothing was created");

    // That number does, also for more connections than it allows, and for a restart.
    for round in 0..2 {
        let address = free_address();
        let listen = format!("--listen-addr={address}");
        let arguments = [&[listen.as_str()], &arguments[1..]].concat();
        let mut command = limited(&format!("-n {needed}"), &arguments);
        let mut server = command.stderr(Stdio::null()).spawn().unwrap();
        until_serving(address).await;
        let mut connections = Vec::new();
        for _ in 0..needed {
            connections.extend(tokio::net::TcpStream::connect(address).await);
        }
        drop(connections);
        let client = process::patient_client(address, round);
        let producer = client.producer(helix_client::ProducerOptions::default());
        for partition in 0..4 {
            let record = helix_proto::log::v1::Record::default();
            soon(producer.append("default", partition, &[record][..])).await.unwrap();
        }
        assert!(server.try_wait().unwrap().is_none(), "it ended");
        process::kill(server).await;
    }
}

#[tokio::test]
async fn soft_limit_of_open_files_is_raised_to_the_hard_one() {
    let directory = tempfile::tempdir().unwrap();
    let shown = directory.path().to_str().unwrap();
    let address = free_address();
    let listen = format!("--listen-addr={address}");
    let arguments = [listen.as_str(), "--admin-addr=off", "--data-dir", shown];
    let server = limited("-S -n 60", &arguments).stderr(Stdio::null()).spawn().unwrap();
    until_serving(address).await;
    let limits = fs::read_to_string(format!("/proc/{}/limits", server.id().unwrap())).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let numbers: Vec<&str> = line.split_whitespace().skip(3).take(2).collect();
    assert_eq!(numbers[0], numbers[1], "{line}");
    process::kill(server).await;
}

#[tokio::test]
async fn error_names_data_directory_that_cannot_be_created() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, b"not a directory").unwrap();
    let shown = file.to_str().unwrap();
    let (code, said) = fails(&["--listen-addr=127.0.0.1:0", "--data-dir", shown]).await;
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains(shown) && said.contains("is not a directory"), "{said}");
}

#[tokio::test]
async fn error_names_a_dangling_link_and_its_target() {
    let folder = tempfile::tempdir().unwrap();
    let link = folder.path().join("link");
    std::os::unix::fs::symlink("/nowhere/at-all", &link).unwrap();
    let shown = link.to_str().unwrap();
    let below = link.join("data");
    for path in [shown, below.to_str().unwrap()] {
        let (code, said) = fails(&["--listen-addr=127.0.0.1:0", "--data-dir", path]).await;
        assert_eq!(code, Some(1), "{said}");
        for part in [shown, "is a symbolic link to /nowhere/at-all", "create that directory"] {
            assert!(said.contains(part), "no {part:?} in {said}");
        }
    }
}
