//! A single node whose last group is damaged says so: in its log, and to readers beyond its end.

#![allow(clippy::disallowed_methods)]

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use helix_client::{Client, FetchOptions, Position, ProducerOptions, ReadStart};
use helix_proto::log::v1::{ErrorReason, Record};
use tokio::io::{AsyncBufReadExt, BufReader};

use crate::process;

const DEADLINE: Duration = Duration::from_secs(30);

/// Returns the segment that holds the bytes, and their first position.
fn find(directory: &Path, bytes: &[u8]) -> (PathBuf, u64) {
    for file in std::fs::read_dir(directory.join("shard-1")).unwrap() {
        let path = file.unwrap().path();
        let content = std::fs::read(&path).unwrap_or_default();
        let position = content.windows(bytes.len()).position(|window| window == bytes);
        if let Some(position) = position {
            return (path, position as u64);
        }
    }
    panic!("no segment holds the record");
}

async fn append(client: &Client, value: &str) -> u64 {
    let record = Record { value: Some(value.to_owned().into_bytes().into()), ..Record::default() };
    let producer = client.producer(ProducerOptions::default());
    let ack = producer.append("default", 0, &[record][..]).await.unwrap();
    ack.first_offset.unwrap()
}

async fn fetch(client: &Client, offset: u64) -> Result<usize, helix_client::Error> {
    let start = ReadStart::new("default", 0, Position::Offset(offset));
    let fetched = client.consumer().fetch(&[start], &FetchOptions::default()).await?;
    Ok(fetched[0].records.len())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_last_group_of_a_single_node_is_no_empty_end() {
    let directory = tempfile::tempdir().unwrap();
    let address = process::free_address();
    let arguments = process::arguments(address, directory.path());
    let server = process::start(&arguments);
    let client = process::patient_client(address, 1);
    assert_eq!(append(&client, "a record that stays").await, 0);
    assert_eq!(append(&client, "a record that is lost").await, 1);
    process::kill(server).await;

    // Damages the group and the sync marker that may follow it.
    let (segment, position) = find(directory.path(), b"a record that is lost");
    let file = OpenOptions::new().write(true).open(segment).unwrap();
    file.write_all_at(&[0; 64 << 10], position).unwrap();
    drop(file);

    let mut server = process::start_with(&arguments, Stdio::piped());
    let mut lines = BufReader::new(server.stderr.take().unwrap()).lines();
    let warning = tokio::time::timeout(DEADLINE, async {
        loop {
            let line = lines.next_line().await.unwrap().expect("the node runs");
            if line.contains("truncated the last group of the log") {
                return line;
            }
        }
    });
    let warning = warning.await.expect("the node says what it truncated");
    assert!(
        warning.contains("WARN") && warning.contains("may have been acknowledged"),
        "{warning}"
    );
    assert!(warning.contains("first_byte=") && warning.contains("next_byte="), "{warning}");
    // The node must never wait for a reader of its log.
    let rest = tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });

    let client = process::patient_client(address, 2);
    assert_eq!(fetch(&client, 0).await.unwrap(), 1);
    let error = fetch(&client, 2).await.unwrap_err();
    assert_eq!(error.reason, Some(ErrorReason::CorruptLog), "{error}");
    let text = error.to_string();
    assert!(text.contains("above the end 1") && text.contains("may have been"), "{text}");

    // Later records take the offsets; then there is nothing to warn of.
    assert_eq!(append(&client, "a later record").await, 1);
    assert_eq!(append(&client, "and one more").await, 2);
    assert_eq!(fetch(&client, 2).await.unwrap(), 1);
    process::kill(server).await;
    rest.await.unwrap();
}
