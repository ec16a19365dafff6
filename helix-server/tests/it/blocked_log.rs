//! The program with a standard error that takes nothing: the service, its end and its exit code are
//! as if it took everything.

use std::fs::OpenOptions;
use std::io::{PipeReader, Write};
use std::net::SocketAddr;
use std::process::{ExitStatus, Stdio};

use helix_server::limits::SHUTDOWN_WAIT_MAX;
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};
use tokio::time::Instant;

use crate::admin;
use crate::process::{free_address, patient_client};
use crate::support::{records, soon};
use crate::trio::until;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StandardError {
    /// Each write fails: no space is left.
    Full,
    /// A pipe whose reader has gone.
    Closed,
    /// A pipe that is full and not read.
    Blocked,
}

impl StandardError {
    const ALL: [Self; 3] = [Self::Full, Self::Closed, Self::Blocked];

    /// Opens it; a blocked pipe stays so for as long as its reader is kept.
    fn open(self) -> (Stdio, Option<PipeReader>) {
        if self == Self::Full {
            return (OpenOptions::new().write(true).open("/dev/full").unwrap().into(), None);
        }
        let (reader, mut writer) = std::io::pipe().unwrap();
        if self == Self::Closed {
            return (writer.into(), None);
        }
        fcntl_setfl(&writer, OFlags::NONBLOCK).unwrap();
        while writer.write(&[b'.'; 4096]).is_ok() {}
        fcntl_setfl(&writer, OFlags::empty()).unwrap();
        (writer.into(), Some(reader))
    }
}

fn start(stderr: Stdio, arguments: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_helix-server"));
    command
        .args(["--storage=memory", "--topic=default:4"])
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    command.stderr(stderr).kill_on_drop(true).spawn().unwrap()
}

async fn terminated(server: &mut Child) -> ExitStatus {
    let pid = Pid::from_raw(i32::try_from(server.id().unwrap()).unwrap()).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    soon(server.wait()).await.unwrap()
}

async fn dropped_lines(admin: SocketAddr) -> f64 {
    admin::metrics(admin).await["helix_log_dropped_lines_total"]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unwritable_log_costs_lines_only() {
    for kind in StandardError::ALL {
        let (address, admin) = (free_address(), free_address());
        let (stderr, reader) = kind.open();
        let listen = [format!("--listen-addr={address}"), format!("--admin-addr={admin}")];
        let mut server = start(stderr, &[&listen[0], &listen[1]]);
        let producer =
            patient_client(address, 1).producer(helix_client::ProducerOptions::default());
        let ack = producer.append("default", 0, &records(&["a"])[..]).await.unwrap();
        assert_eq!(ack.first_offset, Some(0), "{kind:?}");
        if kind == StandardError::Blocked {
            assert_eq!(dropped_lines(admin).await, 0.0, "lines that wait are not dropped yet");
        } else {
            until("a line is dropped", async || (dropped_lines(admin).await > 0.0).then_some(()))
                .await;
        }
        let begin = Instant::now();
        let status = terminated(&mut server).await;
        assert_eq!(status.code(), Some(0), "{kind:?}");
        // The wait for the log is a part of it.
        assert!(begin.elapsed() < SHUTDOWN_WAIT_MAX, "{kind:?}: {:?}", begin.elapsed());
        drop(reader);
    }
}

#[tokio::test]
async fn failed_start_has_its_exit_code() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = format!("--listen-addr={}", taken.local_addr().unwrap());
    for kind in StandardError::ALL {
        for format in ["text", "json"] {
            let (stderr, reader) = kind.open();
            let format = format!("--log-format={format}");
            let mut server = start(stderr, &[&listen, "--admin-addr=off", &format]);
            let status = soon(server.wait()).await.unwrap();
            assert_eq!(status.code(), Some(1), "{kind:?} {format}");
            drop(reader);
        }
    }
    // Said before there is a log. A blocked pipe blocks this, and no service.
    for kind in [StandardError::Full, StandardError::Closed] {
        let mut server = start(kind.open().0, &["--check-config", "--shards=99"]);
        assert_eq!(soon(server.wait()).await.unwrap().code(), Some(2), "{kind:?}");
    }
}
