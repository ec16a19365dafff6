//! The input of `helix produce`: pieces of standard input or a file, and the records in them.

use std::fs::{File, Metadata};
use std::io::Read;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::SystemTime;

use anyhow::Context as _;
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use helix_client::proto::log::v1::{Header, Record};
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncRead, BufReader, ReadBuf};
use tokio::sync::mpsc;

use super::json_record;
use crate::args::ProduceArgs;
use crate::exit::{CliError, Exit};
use crate::files;
use crate::line_parser::LineParser;

/// Maximum length of a line; no topic accepts larger records.
const LINE_BYTES_MAX: usize = 8 << 20;

/// Maximum length of a line in which bytes are encoded as base64 or JSON.
const ENCODED_LINE_BYTES_MAX: usize = 48 << 20;

/// Size of the chunks that are read from a file.
const CHUNK_BYTES: usize = 64 << 10;

/// Chunks of a file that are read ahead.
const CHUNKS_AHEAD: usize = 4;

/// A record of the input.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct InputRecord {
    /// Partition, if the input states it.
    pub(crate) partition: Option<u32>,
    pub(crate) record: Record,
}

/// Reads the records of the input.
pub(super) struct RecordInput {
    pieces: InputPieces<BufReader<Source>>,
    parser: RecordParser,
    /// With --tombstone: the only record, until it is returned.
    tombstone: Option<InputRecord>,
    is_file: bool,
    /// Size of the file that is read; None if the input has no known end.
    size: Option<u64>,
}

impl RecordInput {
    /// Opens the input.
    ///
    /// # Errors
    /// Fails if the file cannot be opened.
    pub(super) fn open(args: &ProduceArgs) -> anyhow::Result<Self> {
        let file = args.file.as_ref().filter(|path| path.as_os_str() != "-");
        let (source, size) = match file {
            Some(path) => {
                let opened = files::open(path);
                let opened = opened.with_context(|| format!("open {}", path.display()))?;
                let size = size_of(&opened);
                (Source::File(FileChunks::new(opened)), size)
            }
            None => (Source::Standard(tokio::io::stdin()), size_of_standard_input()),
        };
        let parser = RecordParser::new(args);
        let end = if args.null_separated { b'\0' } else { b'\n' };
        let pieces = InputPieces::new(BufReader::new(source), end, parser.line_bytes_max());
        let tombstone = args.tombstone.then(|| {
            let mut input = InputRecord::default();
            parser.complete(&mut input);
            input
        });
        Ok(Self { pieces, parser, tombstone, is_file: file.is_some() || args.tombstone, size })
    }

    pub(super) fn is_standard_input(&self) -> bool {
        !self.is_file
    }

    /// Returns the number of records read so far, including an invalid record.
    pub(super) fn count(&self) -> u64 {
        self.pieces.count
    }

    /// Returns the number of bytes read so far and the size of the input, if that is known.
    pub(super) fn bytes_read(&self) -> (u64, Option<u64>) {
        (self.pieces.bytes_read, self.size)
    }

    /// Returns the next record, or None at the end. Cancel safe.
    pub(super) async fn next(&mut self) -> anyhow::Result<Option<InputRecord>> {
        if self.parser.has_tombstone {
            self.pieces.count = 1;
            return Ok(self.tombstone.take());
        }
        match self.pieces.next().await? {
            Some(piece) => self.parser.parse(piece).map(Some),
            None => Ok(None),
        }
    }
}

/// Returns the size of a regular file; a pipe or a device has none.
fn size_of(file: &File) -> Option<u64> {
    file.metadata().ok().filter(Metadata::is_file).map(|metadata| metadata.len())
}

/// Returns the size of the file that standard input is redirected from.
fn size_of_standard_input() -> Option<u64> {
    let input = std::io::stdin().as_fd().try_clone_to_owned().ok()?;
    size_of(&File::from(input))
}

/// Makes records of pieces.
struct RecordParser {
    form: PieceForm,
    /// Key of records that the input gives none.
    key: Option<Bytes>,
    /// Headers of every record.
    headers: Vec<Header>,
    /// Event time of records that the input gives none.
    event_time: Option<SystemTime>,
    has_tombstone: bool,
}

enum PieceForm {
    /// A value, after a key if there is a separator.
    Plain {
        key_separator: Option<String>,
        is_base64: bool,
    },
    /// One JSON object, as `consume -o jsonl` prints it.
    Json,
    Format(LineParser),
}

impl RecordParser {
    fn new(args: &ProduceArgs) -> Self {
        let form = match &args.format {
            Some(format) => PieceForm::Format(format.clone()),
            None if args.jsonl => PieceForm::Json,
            None => PieceForm::Plain {
                key_separator: args.key_separator.clone(),
                is_base64: args.base64,
            },
        };
        Self {
            form,
            key: args.key.clone().map(Bytes::from),
            headers: args.headers.clone(),
            event_time: args.event_time.map(|time| time.0),
            has_tombstone: args.tombstone,
        }
    }

    fn line_bytes_max(&self) -> usize {
        match &self.form {
            PieceForm::Plain { is_base64: false, .. } => LINE_BYTES_MAX,
            _ => ENCODED_LINE_BYTES_MAX,
        }
    }

    fn parse(&self, piece: Vec<u8>) -> anyhow::Result<InputRecord> {
        let mut input = match &self.form {
            PieceForm::Plain { key_separator, is_base64 } => {
                let (key, value) = split(Bytes::from(piece), key_separator.as_deref());
                let decoded = |bytes: Bytes| match is_base64 {
                    true => decode_base64(&bytes).map_err(invalid),
                    false => Ok(bytes),
                };
                let (key, value) = (key.map(decoded).transpose()?, Some(decoded(value)?));
                let record = Record { key, value, ..Record::default() };
                InputRecord { partition: None, record }
            }
            PieceForm::Json => json_record::parse(&piece).map_err(invalid)?,
            PieceForm::Format(parser) => parser.parse(&piece).map_err(invalid)?,
        };
        self.complete(&mut input);
        Ok(input)
    }

    /// Adds what the options give to every record.
    fn complete(&self, input: &mut InputRecord) {
        let record = &mut input.record;
        if record.key.is_none() {
            record.key = self.key.clone();
        }
        record.headers.extend(self.headers.iter().cloned());
        if record.event_time.is_none() {
            record.event_time = self.event_time.map(Into::into);
        }
    }
}

fn invalid(why: String) -> CliError {
    CliError::new(Exit::Usage, "the input is not a record").why(why)
}

/// Decodes base64 text.
pub(crate) fn decode_base64(text: &[u8]) -> Result<Bytes, String> {
    let decoded = BASE64.decode(text);
    decoded.map(Bytes::from).map_err(|error| format!("the text is not base64: {error}"))
}

/// Splits a line into key and value.
fn split(line: Bytes, separator: Option<&str>) -> (Option<Bytes>, Bytes) {
    let Some(separator) = separator.map(str::as_bytes) else { return (None, line) };
    match line.windows(separator.len()).position(|window| window == separator) {
        Some(start) => (Some(line.slice(..start)), line.slice(start + separator.len()..)),
        None => (None, line),
    }
}

/// Where the input comes from.
enum Source {
    Standard(tokio::io::Stdin),
    File(FileChunks),
}

impl AsyncRead for Source {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        match self.get_mut() {
            Self::Standard(input) => Pin::new(input).poll_read(context, buffer),
            Self::File(chunks) => Pin::new(chunks).poll_read(context, buffer),
        }
    }
}

/// Chunks of a file. A thread reads them, because a pipe may keep a read waiting.
struct FileChunks {
    chunks: mpsc::Receiver<std::io::Result<Vec<u8>>>,
    current: Bytes,
}

impl FileChunks {
    fn new(mut file: File) -> Self {
        let (sender, chunks) = mpsc::channel(CHUNKS_AHEAD);
        std::thread::spawn(move || {
            loop {
                let mut chunk = vec![0; CHUNK_BYTES];
                let read = file.read(&mut chunk).map(|length| {
                    chunk.truncate(length);
                    chunk
                });
                let is_last = read.as_ref().map_or(true, Vec::is_empty);
                // The receiver is gone when the command ends early.
                if sender.blocking_send(read).is_err() || is_last {
                    return;
                }
            }
        });
        Self { chunks, current: Bytes::new() }
    }
}

impl AsyncRead for FileChunks {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        if self.current.is_empty() {
            match ready!(self.chunks.poll_recv(context)) {
                Some(chunk) => self.current = chunk?.into(),
                None => return Poll::Ready(Ok(())),
            }
        }
        let length = self.current.len().min(buffer.remaining());
        buffer.put_slice(&self.current.split_to(length));
        Poll::Ready(Ok(()))
    }
}

/// Reads pieces of arbitrary bytes, without the byte that ends each.
struct InputPieces<R> {
    input: R,
    end: u8,
    bytes_max: usize,
    piece: Vec<u8>,
    /// Number of pieces read.
    count: u64,
    /// Number of bytes read, with the ends of the pieces.
    bytes_read: u64,
}

impl<R: AsyncBufRead + Unpin> InputPieces<R> {
    fn new(input: R, end: u8, bytes_max: usize) -> Self {
        Self { input, end, bytes_max, piece: Vec::new(), count: 0, bytes_read: 0 }
    }

    /// Returns the next piece; the last one may lack its end. Cancel safe.
    async fn next(&mut self) -> anyhow::Result<Option<Vec<u8>>> {
        let piece = self.read().await;
        self.count += u64::from(!matches!(piece, Ok(None)));
        piece
    }

    async fn read(&mut self) -> anyhow::Result<Option<Vec<u8>>> {
        loop {
            let bytes = self.input.fill_buf().await.context("read the input")?;
            if bytes.is_empty() {
                let is_piece = !self.piece.is_empty();
                return Ok(is_piece.then(|| std::mem::take(&mut self.piece)));
            }
            let found = bytes.iter().position(|byte| *byte == self.end);
            let length = found.unwrap_or(bytes.len());
            self.piece.extend_from_slice(&bytes[..length]);
            let consumed = found.map_or(length, |found| found + 1);
            self.input.consume(consumed);
            self.bytes_read += consumed as u64;
            if self.piece.len() > self.bytes_max {
                let what = format!("a line exceeds {} bytes", self.bytes_max);
                let failure = CliError::new(Exit::Error, what);
                return Err(failure.why("each line is one record").into());
            }
            if found.is_some() {
                return Ok(Some(std::mem::take(&mut self.piece)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, CliCommand};

    async fn pieces(input: &[u8], end: u8) -> Vec<Vec<u8>> {
        // A small buffer makes pieces span several reads.
        let mut pieces = InputPieces::new(BufReader::with_capacity(3, input), end, LINE_BYTES_MAX);
        let mut all = Vec::new();
        while let Some(piece) = pieces.next().await.unwrap() {
            all.push(piece);
        }
        all
    }

    fn parsed(options: &[&str], piece: &[u8]) -> anyhow::Result<InputRecord> {
        let args = [&["helix", "produce", "orders"], options].concat();
        let CliCommand::Produce(args) = Cli::try_parse_from(args).unwrap().command else {
            panic!("produce")
        };
        RecordParser::new(&args).parse(piece.to_vec())
    }

    #[tokio::test]
    async fn reads_lines_of_arbitrary_bytes() {
        assert!(pieces(b"", b'\n').await.is_empty());
        assert_eq!(pieces(b"hello\n", b'\n').await, [b"hello"]);
        assert_eq!(pieces(b"hello\n\nlast", b'\n').await, [&b"hello"[..], b"", b"last"]);
        assert_eq!(pieces(b"\xFF\x00\r\n", b'\n').await, [b"\xFF\x00\r"]);
        assert_eq!(pieces(b"two\nlines\0end", b'\0').await, [&b"two\nlines"[..], b"end"]);
    }

    #[tokio::test]
    async fn reads_a_file_in_chunks() {
        let mut file = tempfile::tempfile().unwrap();
        let line = "x".repeat(CHUNK_BYTES + 7);
        std::io::Write::write_all(&mut file, format!("{line}\nb\n").as_bytes()).unwrap();
        std::io::Seek::rewind(&mut file).unwrap();
        let reader = BufReader::new(Source::File(FileChunks::new(file)));
        let mut pieces = InputPieces::new(reader, b'\n', LINE_BYTES_MAX);
        assert_eq!(pieces.next().await.unwrap().unwrap().len(), line.len());
        assert_eq!(pieces.next().await.unwrap().unwrap(), b"b");
        assert!(pieces.next().await.unwrap().is_none());
        assert_eq!(pieces.count, 2);
    }

    #[test]
    fn key_ends_at_the_first_separator() {
        let parts = |line: &'static str, separator| {
            let (key, value) = split(Bytes::from_static(line.as_bytes()), separator);
            let text = |bytes: Bytes| String::from_utf8(bytes.to_vec()).unwrap();
            (key.map(text), text(value))
        };
        assert_eq!(parts("a:b:c", None), (None, "a:b:c".to_owned()));
        assert_eq!(parts("a:b:c", Some(":")), (Some("a".to_owned()), "b:c".to_owned()));
        assert_eq!(parts("a=>b", Some("=>")), (Some("a".to_owned()), "b".to_owned()));
        assert_eq!(parts(":b", Some(":")), (Some(String::new()), "b".to_owned()));
        assert_eq!(parts("ab", Some(":")), (None, "ab".to_owned()));
    }

    #[test]
    fn options_complete_records() {
        let options = ["-k", "customer-7", "-H", "a=1", "-H", "b=x=y"];
        let record = parsed(&options, b"hello").unwrap().record;
        assert_eq!(record.key.as_deref(), Some(&b"customer-7"[..]));
        assert_eq!(record.headers[1], Header { name: "b".to_owned(), value: "x=y".into() });
        let timed = parsed(&["--event-time", "2026-01-31T10:00:00Z"], b"hello").unwrap().record;
        assert_eq!(
            timed.event_time.map(|time| time.to_string()).as_deref(),
            Some("2026-01-31T10:00:00Z")
        );
    }

    #[test]
    fn base64_applies_to_keys_and_values() {
        let options = ["--base64", "--key-separator", ":"];
        let record = parsed(&options, b"aw==:/wA=").unwrap().record;
        assert_eq!(
            (record.key.as_deref(), record.value.as_deref()),
            (Some(&b"k"[..]), Some(&b"\xFF\0"[..]))
        );
        assert!(parsed(&options, b"aw==:*").is_err());
    }

    #[test]
    fn format_reads_what_consume_prints() {
        let options = ["-f", "%p\\t%o\\t%e\\t%k\\t%v\\n"];
        let input = parsed(&options, b"2\t77\t2026-01-31T10:00:00Z\tk\tv\tw").unwrap();
        assert_eq!(input.partition, Some(2));
        assert_eq!(input.record.value.as_deref(), Some(&b"v\tw"[..]));
        let failure = parsed(&options, b"2 77").unwrap_err();
        assert!(failure.downcast_ref::<CliError>().unwrap().why.contains("\\t"), "{failure:?}");
    }
}
