//! A segment file: its bytes, and the tables of its footer once it is sealed.
//!
//! The role of the segment in the log is tracked in `memory/`.

use std::io;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock};

use bytes::Bytes;

use crate::error::{Error, changing, failed};
use crate::files::aligned::Aligned;
use crate::files::footer_cache::FooterCache;
use crate::files::open_files::OpenFiles;
use crate::format::footer::{
    DirectoryRow, Footer, FooterRow, FooterTable, IndexRow, PlacedRow, Trailer, page_verifies,
    row_of,
};
use crate::format::layout::{BLOCK_BYTES, cold_name, segment_name};
use crate::storage::{BLOCK, File};
use crate::sync::IgnorePoison;
use crate::types::ReadMode;

/// Reason why a read returned nothing.
#[derive(Debug)]
pub(crate) enum ReadStop {
    /// The read would have had to wait for the disk.
    WouldBlock,
    Failed(Error),
}

impl From<Error> for ReadStop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// Converts `WouldBlock` to `Ok(None)`.
pub(crate) fn unless_blocked<T>(result: Result<T, ReadStop>) -> Result<Option<T>, Error> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(ReadStop::WouldBlock) => Ok(None),
        Err(ReadStop::Failed(error)) => Err(error),
    }
}

/// Access of a segment to its file.
#[derive(Debug, Clone)]
enum FileAccess {
    Open(Arc<dyn File>),
    /// Sealed: opened on demand.
    OnDemand(Arc<OpenFiles>),
}

#[derive(Debug)]
pub(crate) struct Segment {
    pub id: u64,
    file: Mutex<FileAccess>,
    pub len: u64,
    /// Not part of the chain: written as a whole, with gaps in the index.
    pub cold: bool,
    /// Set once, when the footer is durable.
    trailer: OnceLock<Trailer>,
    /// Damage of the footer, because of which no entry of the segment is readable.
    quarantined: OnceLock<Error>,
}

impl Segment {
    pub(crate) fn new(id: u64, file: Arc<dyn File>, len: u64) -> Self {
        let file = Mutex::new(FileAccess::Open(file));
        Self { id, file, len, cold: false, trailer: OnceLock::new(), quarantined: OnceLock::new() }
    }

    pub(crate) fn new_cold(id: u64, file: Arc<dyn File>, len: u64) -> Self {
        Self { cold: true, ..Self::new(id, file, len) }
    }

    /// Opens the file only on demand from now on.
    pub(crate) fn open_on_demand(&self, files: &Arc<OpenFiles>) {
        let mut kept = self.file.lock().ignore_poison();
        let before = std::mem::replace(&mut *kept, FileAccess::OnDemand(Arc::clone(files)));
        drop(kept);
        if let FileAccess::Open(file) = before {
            files.put(self.id, file);
        }
    }

    /// Returns the file; `None` if it is not open and `mode` forbids opening it.
    pub(crate) fn file(&self, mode: ReadMode) -> io::Result<Option<Arc<dyn File>>> {
        let files = match self.kept() {
            FileAccess::Open(file) => return Ok(Some(file)),
            FileAccess::OnDemand(files) => files,
        };
        let file = files.get(self.id, &self.name(), mode);
        // The file was removed meanwhile and kept open for its readers.
        if file.is_err()
            && let FileAccess::Open(file) = self.kept()
        {
            return Ok(Some(file));
        }
        file
    }

    fn kept(&self) -> FileAccess {
        self.file.lock().ignore_poison().clone()
    }

    /// Keeps the file open while the segment is referenced, so that its name can be removed.
    pub(crate) fn keep_open(&self) -> io::Result<()> {
        let file = self.opened()?;
        let mut kept = self.file.lock().ignore_poison();
        let before = std::mem::replace(&mut *kept, FileAccess::Open(file));
        drop(kept);
        if let FileAccess::OnDemand(files) = before {
            files.take(self.id);
        }
        Ok(())
    }

    /// Returns the file, opened if necessary.
    pub(crate) fn opened(&self) -> io::Result<Arc<dyn File>> {
        self.file(ReadMode::Blocking)?.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Closes the file, if only the pool keeps it open.
    pub(crate) fn close(&self) {
        if let FileAccess::OnDemand(files) = &*self.file.lock().ignore_poison() {
            files.take(self.id);
        }
    }

    pub(crate) fn name(&self) -> String {
        if self.cold { cold_name(self.id) } else { segment_name(self.id) }
    }

    pub(crate) fn trailer(&self) -> Option<&Trailer> {
        self.trailer.get()
    }

    pub(crate) fn set_trailer(&self, trailer: Trailer) {
        // Ignored: a segment is sealed once.
        let _ = self.trailer.set(trailer);
    }

    /// Makes every later read through the tables fail with `damage`.
    pub(crate) fn quarantine(&self, damage: Error) {
        // Ignored: the first damage found is sufficient.
        let _ = self.quarantined.set(damage);
    }

    pub(crate) fn quarantined(&self) -> Option<&Error> {
        self.quarantined.get()
    }

    fn check_tables(&self) -> Result<(), Error> {
        self.quarantined().map_or(Ok(()), |damage| Err(damage.clone()))
    }

    pub(crate) fn damaged(&self, bytes: Range<u64>, what: &str) -> Error {
        Error::Damaged { file: self.name(), bytes, what: what.to_owned() }
    }

    /// Fills `buf`. Waits for the disk only if `mode` allows it.
    pub(crate) fn read(&self, buf: &mut [u8], offset: u64, mode: ReadMode) -> Result<(), ReadStop> {
        let range = offset..offset + buf.len() as u64;
        if range.end > self.len {
            return Err(self.damaged(range, "lies beyond the end of the file").into());
        }
        let file = self.file(mode).map_err(|e| self.open_error(&e))?;
        let result = match (file, mode) {
            (None, _) | (_, ReadMode::MemoryOnly) => Ok(false),
            (Some(file), ReadMode::CachedOnly) => file.try_read_at(buf, offset),
            (Some(file), ReadMode::Blocking) => file.read_at(buf, offset).map(|()| true),
            (Some(file), ReadMode::Direct) => file.read_device_at(buf, offset).map(|()| true),
        };
        match result {
            Ok(true) => Ok(()),
            Ok(false) => Err(ReadStop::WouldBlock),
            Err(e) => Err(self.read_error(range, &e).into()),
        }
    }

    /// Announces that a range will be read soon.
    pub(crate) fn will_read(&self, range: Range<u64>) {
        // Ignored: the following read reports the error.
        if let Ok(Some(file)) = self.file(ReadMode::Blocking) {
            file.will_read(range);
        }
    }

    /// Fills `buf` from the device, bypassing the page cache.
    pub(crate) fn read_device(&self, buf: &mut [u8], offset: u64) -> Result<(), Error> {
        let range = offset..offset + buf.len() as u64;
        let file = self.opened().map_err(|e| self.open_error(&e))?;
        file.read_device_at(buf, offset).map_err(|e| self.read_error(range, &e))
    }

    /// Converts an open error. A missing file is damage; too many open files are not.
    fn open_error(&self, e: &io::Error) -> Error {
        if e.kind() == io::ErrorKind::NotFound {
            return self.damaged(0..self.len, "the file is missing");
        }
        failed("open", &self.name(), e)
    }

    fn read_error(&self, bytes: Range<u64>, e: &io::Error) -> Error {
        if e.kind() == io::ErrorKind::UnexpectedEof {
            return self.damaged(bytes, "the file is shorter than it was");
        }
        failed("read", &self.name(), e)
    }

    /// Makes a footer durable: first the tables, then the trailer.
    ///
    /// After a shortage the call can be repeated.
    pub(crate) fn write_footer(&self, footer: &Footer) -> Result<(), Error> {
        let name = self.name();
        let file = self.opened().map_err(|e| changing("open", &name, &e))?;
        let write = |bytes: &[u8], at: u64| -> Result<(), Error> {
            let block = Aligned::copy(bytes);
            file.write_at(block.as_slice(), at).map_err(|e| changing("write", &name, &e))?;
            file.sync_data().map_err(|e| changing("sync", &name, &e))
        };
        if !footer.pages.is_empty() {
            write(&footer.pages, footer.trailer.footer_start)?;
        }
        write(&footer.trailer_block, self.len - BLOCK_BYTES)
    }

    /// Returns the index table of a sealed segment.
    pub(crate) fn by_index<'a>(
        &'a self,
        cache: &'a FooterCache,
        mode: ReadMode,
    ) -> TableReader<'a, IndexRow> {
        let table = self.trailer().map(|t| t.index).unwrap_or_default();
        TableReader::new(self, cache, mode, table)
    }

    /// Returns the stream table of a sealed segment.
    pub(crate) fn by_stream<'a>(
        &'a self,
        cache: &'a FooterCache,
        mode: ReadMode,
    ) -> TableReader<'a, PlacedRow> {
        let table = self.trailer().map(|t| t.streams).unwrap_or_default();
        TableReader::new(self, cache, mode, table)
    }

    /// Returns the directory of streams of a sealed segment.
    pub(crate) fn directory<'a>(
        &'a self,
        cache: &'a FooterCache,
        mode: ReadMode,
    ) -> TableReader<'a, DirectoryRow> {
        let table = self.trailer().map(|t| t.directory).unwrap_or_default();
        TableReader::new(self, cache, mode, table)
    }

    /// Returns a verified footer page.
    fn page(&self, cache: &FooterCache, number: u32, mode: ReadMode) -> Result<Bytes, ReadStop> {
        self.check_tables()?;
        if let Some(page) = cache.get(self.id, number) {
            return Ok(page);
        }
        let start = self.trailer().map_or(0, |t| t.footer_start);
        let offset = start + u64::from(number) * BLOCK_BYTES;
        let mut page = vec![0; BLOCK];
        self.read(&mut page, offset, mode)?;
        if !page_verifies(&page, self.id, number) {
            let range = offset..offset + BLOCK_BYTES;
            return Err(self.damaged(range, "a page of the footer does not verify").into());
        }
        let page = Bytes::from(page);
        cache.put(self.id, number, page.clone());
        Ok(page)
    }
}

/// Reads rows of one footer table. Neighbouring rows need one cache lookup.
pub(crate) struct TableReader<'a, R> {
    segment: &'a Segment,
    cache: &'a FooterCache,
    mode: ReadMode,
    table: FooterTable,
    current: Option<(u32, Bytes)>,
    row: PhantomData<R>,
}

impl<'a, R: FooterRow> TableReader<'a, R> {
    fn new(
        segment: &'a Segment,
        cache: &'a FooterCache,
        mode: ReadMode,
        table: FooterTable,
    ) -> Self {
        Self { segment, cache, mode, table, current: None, row: PhantomData }
    }

    pub(crate) fn len(&self) -> u32 {
        self.table.rows
    }

    pub(crate) fn get(&mut self, row: u32) -> Result<R, ReadStop> {
        let per_page = R::PER_PAGE as u32;
        let number = self.table.page + row / per_page;
        let page = match &self.current {
            Some((current, page)) if *current == number => page,
            _ => {
                let page = self.segment.page(self.cache, number, self.mode)?;
                &self.current.insert((number, page)).1
            }
        };
        row_of(page, (row % per_page) as usize).ok_or_else(|| {
            self.segment
                .damaged(0..self.segment.len, "a row of the footer is missing or out of range")
                .into()
        })
    }

    /// Returns the first row of `range` for which `before` is false. Rows must be partitioned by
    /// it.
    pub(crate) fn partition_point(
        &mut self,
        range: Range<u32>,
        before: impl Fn(&R) -> bool,
    ) -> Result<u32, ReadStop> {
        let Range { mut start, mut end } = range;
        while start < end {
            let middle = start + (end - start) / 2;
            if before(&self.get(middle)?) {
                start = middle + 1;
            } else {
                end = middle;
            }
        }
        Ok(start)
    }
}

impl TableReader<'_, IndexRow> {
    /// Returns the first row at or after `index`.
    pub(crate) fn find(&mut self, index: u64) -> Result<u32, ReadStop> {
        self.segment.check_tables()?;
        let Some((first, last)) = self.segment.trailer().and_then(|t| t.entries) else {
            return Ok(0);
        };
        // Without gaps the row number follows from the index.
        if last.index - first + 1 == u64::from(self.len()) {
            let row = index.saturating_sub(first).min(u64::from(self.len()));
            return Ok(row as u32);
        }
        self.partition_point(0..self.len(), |row| row.id.index < index)
    }
}
