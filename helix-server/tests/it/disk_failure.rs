//! A failed sync: nothing is acknowledged, the node stops with a clear message, and records acked
//! before survive a restart.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use helix_client::{FetchOptions, Position, ProducerOptions, ReadStart};
use helix_proto::log::v1::Record;
use tokio::io::AsyncReadExt;
use tokio::process::{Child, Command};

use crate::process;
use crate::support::skipped;

fn record(text: String) -> Record {
    Record { value: Some(text.into_bytes().into()), ..Record::default() }
}

/// Returns true if strace can inject failing system calls here; reports a skip otherwise.
async fn can_inject() -> bool {
    let probe = Command::new("strace")
        .args(["-f", "-qq", "-o", "/dev/null", "-e", "trace=fdatasync", "true"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .await;
    let can = probe.is_ok_and(|status| status.success());
    if !can {
        skipped("strace is missing or may not trace: no failed sync was injected");
    }
    can
}

/// Starts a server whose 200th sync fails, and all after it.
fn start_with_failing_syncs(address: SocketAddr, folder: &Path, stderr: Stdio) -> Child {
    // The count of `when` is per thread: it hits the thread that writes the data shard's log,
    // which makes nearly all syncs.
    Command::new("strace")
        .args(["-f", "-qq", "-o", "/dev/null"])
        .args(["-e", "trace=fdatasync", "-e", "inject=fdatasync:error=EIO:when=200+"])
        .arg(env!("CARGO_BIN_EXE_helix-server"))
        .args(process::arguments(address, folder))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(stderr)
        .kill_on_drop(true)
        .spawn()
        .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_sync_has_its_exit_code_without_a_log() {
    if !can_inject().await {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let address = process::free_address();
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let mut server = start_with_failing_syncs(address, folder.path(), full.into());
    let producer = process::patient_client(address, 1).producer(ProducerOptions::default());
    let appends = async {
        while producer.append("default", 0, &[record("a".to_owned())][..]).await.is_ok() {}
    };
    let status = tokio::select! {
        status = server.wait() => status.unwrap(),
        () = appends => tokio::time::timeout(Duration::from_secs(20), server.wait())
            .await
            .expect("the node stops")
            .unwrap(),
    };
    assert_eq!(status.code(), Some(70), "{status}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_sync_acknowledges_nothing_and_stops_the_node() {
    if !can_inject().await {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let address = process::free_address();
    let mut server = start_with_failing_syncs(address, directory.path(), Stdio::piped());
    let mut stderr = server.stderr.take().unwrap();
    let message = tokio::spawn(async move {
        let mut text = String::new();
        stderr.read_to_string(&mut text).await.map(|_| text)
    });
    let client = process::patient_client(address, 1);
    let producer = client.producer(ProducerOptions::default());
    let mut acked = Vec::new();
    let failure = loop {
        let text = format!("record {}", acked.len());
        let batch = helix_proto::batch::encode(&[record(text.clone())]);
        let append = producer.append("default", 0, batch);
        match tokio::time::timeout(Duration::from_secs(20), append).await {
            Ok(Ok(ack)) => acked.push((ack.first_offset.unwrap(), text)),
            Ok(Err(error)) => break error.to_string(),
            Err(_) => break "no answer, and no server to give one".to_owned(),
        }
        assert!(acked.len() < 5_000, "the failing sync never came");
    };
    println!("{} batches acknowledged, then: {failure}", acked.len());
    let status = tokio::time::timeout(Duration::from_secs(20), server.wait()).await;
    let status = status.expect("the node stops").unwrap();
    assert_eq!(status.code(), Some(70), "{status}");
    let message = message.await.unwrap().unwrap();
    // Words of the log itself: the rest of the message mentions syncs for every failure.
    assert!(message.contains("sync of ") && message.contains("error 5"), "{message}");
    assert!(message.contains("check the disk"), "{message}");
    assert!(!acked.is_empty(), "some batches came before the failure");

    // On a working disk all acked records are there.
    let server = process::start(&process::arguments(address, directory.path()));
    let client = process::patient_client(address, 2);
    let mut offset = 0;
    let mut found = Vec::new();
    while offset <= acked.last().unwrap().0 {
        let start = ReadStart::new("default", 0, Position::Offset(offset));
        let fetched = client.consumer().fetch(&[start], &FetchOptions::default()).await.unwrap();
        for record in &fetched[0].records {
            found.push((record.offset, String::from_utf8(record.value.clone().unwrap().to_vec())));
        }
        offset = fetched[0].next_offset;
    }
    for (offset, text) in acked {
        assert_eq!(found[usize::try_from(offset).unwrap()], (offset, Ok(text)));
    }
    process::kill(server).await;
}
