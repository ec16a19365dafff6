//! Redis streams over RESP: the XADDs of a batch are one write, and each has its own reply.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use anyhow::{Context, Result, bail, ensure};

use crate::{Connection, Options};

const STREAM: &str = "helix-peers";
/// Length to which a stream is trimmed, so that it stays in memory.
const RECORDS_MAX: &str = "200000";
/// A reply of Redis is a short line; more is not one.
const REPLY_MAX: u64 = 1024;

pub(crate) struct Streams {
    reader: BufReader<TcpStream>,
    batch: Vec<u8>,
    records: u32,
}

/// Connects, and deletes the stream of an earlier run if `empty`.
pub(crate) fn open(options: &Options, empty: bool) -> Result<Streams> {
    let stream = TcpStream::connect(&options.addr)?;
    stream.set_nodelay(true)?;
    let payload = "x".repeat(options.size as usize);
    let add = command(&["XADD", STREAM, "MAXLEN", "~", RECORDS_MAX, "*", "v", &payload]);
    let mut streams = Streams {
        reader: BufReader::with_capacity(64 << 10, stream),
        batch: add.repeat(options.batch_size as usize).into_bytes(),
        records: options.batch_size,
    };
    if empty {
        streams.reader.get_mut().write_all(command(&["DEL", STREAM]).as_bytes())?;
        streams.reply().context("cannot delete the stream of the last run")?;
    }
    Ok(streams)
}

fn command(words: &[&str]) -> String {
    let mut text = format!("*{}\r\n", words.len());
    for word in words {
        text += &format!("${}\r\n{word}\r\n", word.len());
    }
    text
}

impl Connection for Streams {
    fn append(&mut self) -> Result<()> {
        self.reader.get_mut().write_all(&self.batch)?;
        for _ in 0..self.records {
            self.reply()?;
        }
        Ok(())
    }
}

impl Streams {
    fn reply(&mut self) -> Result<()> {
        let mut line = String::new();
        (&mut self.reader).take(REPLY_MAX).read_line(&mut line)?;
        match line.as_bytes().first() {
            Some(b':' | b'+') => Ok(()),
            Some(b'$') => {
                let length: u64 = line[1..].trim_end().parse().context("bad length of a reply")?;
                ensure!(length <= REPLY_MAX, "a reply of {length} bytes");
                std::io::copy(&mut (&mut self.reader).take(length + 2), &mut std::io::sink())?;
                Ok(())
            }
            _ => bail!("Redis answered {:?}", line.trim_end()),
        }
    }
}
