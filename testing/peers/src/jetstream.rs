//! NATS JetStream: the publishes of a batch are one write, and each has its own ack.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use anyhow::{Context, Result, bail, ensure};

use crate::{Connection, Options};

const STREAM: &str = "HELIX_PEERS";
const SUBJECT: &str = "helix.peers";
/// An ack is a short JSON object; more is not one.
const MESSAGE_MAX: u64 = 64 << 10;
/// The stream drops its oldest messages beyond these bytes.
const STREAM_BYTES_MAX: u64 = 512 << 20;

pub(crate) struct Publisher {
    reader: BufReader<TcpStream>,
    batch: Vec<u8>,
    records: u32,
}

/// Connects; the first client creates the stream, empty.
pub(crate) fn open(options: &Options, number: u32) -> Result<Publisher> {
    let stream = TcpStream::connect(&options.addr)?;
    stream.set_nodelay(true)?;
    let inbox = format!("_INBOX.helix.{number}");
    let payload = "x".repeat(options.size as usize);
    let publish = format!("PUB {SUBJECT} {inbox} {}\r\n{payload}\r\n", payload.len());
    let mut publisher = Publisher {
        reader: BufReader::with_capacity(64 << 10, stream),
        batch: publish.repeat(options.batch_size as usize).into_bytes(),
        records: options.batch_size,
    };
    let hello = format!("CONNECT {{\"verbose\":false}}\r\nSUB {inbox} 1\r\n");
    publisher.reader.get_mut().write_all(hello.as_bytes())?;
    if number == 0 {
        let create = format!(
            r#"{{"name":"{STREAM}","subjects":["{SUBJECT}"],"storage":"file","retention":"limits","#
        ) + &format!(
            r#""discard":"old","max_bytes":{STREAM_BYTES_MAX},"num_replicas":1}}"#
        );
        // A stream that is not there cannot be deleted: its answer is not looked at.
        publisher.request(&inbox, &format!("$JS.API.STREAM.DELETE.{STREAM}"), "")?;
        let answer =
            publisher.request(&inbox, &format!("$JS.API.STREAM.CREATE.{STREAM}"), &create)?;
        ensure!(!answer.contains("\"error\""), "JetStream did not create the stream: {answer}");
    }
    Ok(publisher)
}

impl Connection for Publisher {
    fn append(&mut self) -> Result<()> {
        self.reader.get_mut().write_all(&self.batch)?;
        for _ in 0..self.records {
            let ack = self.message()?;
            ensure!(ack.contains("\"seq\""), "JetStream refused a message: {ack}");
        }
        Ok(())
    }
}

impl Publisher {
    fn request(&mut self, inbox: &str, subject: &str, body: &str) -> Result<String> {
        let text = format!("PUB {subject} {inbox} {}\r\n{body}\r\n", body.len());
        self.reader.get_mut().write_all(text.as_bytes())?;
        self.message()
    }

    /// Returns the next message of the inbox.
    fn message(&mut self) -> Result<String> {
        loop {
            let mut line = String::new();
            (&mut self.reader).take(MESSAGE_MAX).read_line(&mut line)?;
            let words: Vec<&str> = line.split_whitespace().collect();
            match words.first().copied() {
                Some("MSG") => {
                    let length: u64 =
                        words.last().copied().unwrap_or_default().parse().context("bad MSG")?;
                    ensure!(length <= MESSAGE_MAX, "a message of {length} bytes");
                    let mut body = vec![0; length as usize + 2];
                    self.reader.read_exact(&mut body)?;
                    return String::from_utf8(body).context("a message that is not text");
                }
                Some("PING") => self.reader.get_mut().write_all(b"PONG\r\n")?,
                Some("INFO" | "PONG" | "+OK") => {}
                _ => bail!("NATS answered {:?}", line.trim_end()),
            }
        }
    }
}
