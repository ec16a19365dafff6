//! One segment file: reading its bytes, and the tables of its footer once it is sealed.
//! What the segment means to the log is kept in `log.rs`.

use std::io;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use bytes::Bytes;

use crate::aligned::Aligned;
use crate::error::{failed, poison};
use crate::files::Files;
use crate::footer::{
    DirectoryRow, Footer, IndexRow, PlacedRow, Row, Table, Trailer, page_verifies, row_of,
};
use crate::layout::{BLOCK_BYTES, cold_name, segment_name};
use crate::page_cache::PageCache;
use crate::storage::{BLOCK, File};
use crate::{Error, How};

/// Why a read gave nothing.
#[derive(Debug)]
pub(crate) enum Stop {
    /// It would have had to wait for the disk.
    WouldBlock,
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// Turns the inner way of saying "would block" into the outer one.
pub(crate) fn unless_blocked<T>(result: Result<T, Stop>) -> Result<Option<T>, Error> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(Stop::WouldBlock) => Ok(None),
        Err(Stop::Failed(error)) => Err(error),
    }
}

/// How a segment has its file.
#[derive(Debug, Clone)]
enum Kept {
    Open(Arc<dyn File>),
    /// Sealed: opened when it is needed.
    OnDemand(Arc<Files>),
}

#[derive(Debug)]
pub(crate) struct Segment {
    pub id: u64,
    file: Mutex<Kept>,
    pub len: u64,
    /// Written at once, with gaps in the index: no part of the chain of segments.
    pub cold: bool,
    /// Set once, when the footer is durable.
    trailer: OnceLock<Trailer>,
    /// Why nothing of it can be read: its footer was found damaged.
    withheld: OnceLock<Error>,
}

impl Segment {
    pub(crate) fn new(id: u64, file: Arc<dyn File>, len: u64) -> Self {
        let file = Mutex::new(Kept::Open(file));
        Self { id, file, len, cold: false, trailer: OnceLock::new(), withheld: OnceLock::new() }
    }

    pub(crate) fn new_cold(id: u64, file: Arc<dyn File>, len: u64) -> Self {
        Self { cold: true, ..Self::new(id, file, len) }
    }

    /// From now on its file is open only while it is read, and some time after.
    pub(crate) fn open_on_demand(&self, files: &Arc<Files>) {
        let mut kept = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *kept, Kept::OnDemand(Arc::clone(files)));
        drop(kept);
        if let Kept::Open(file) = before {
            files.put(self.id, file);
        }
    }

    /// Its file; `None` if it would have to be opened first.
    pub(crate) fn file(&self, how: How) -> io::Result<Option<Arc<dyn File>>> {
        let files = match self.kept() {
            Kept::Open(file) => return Ok(Some(file)),
            Kept::OnDemand(files) => files,
        };
        let file = files.get(self.id, &self.name(), how);
        // Its name was removed meanwhile, and its file kept for whoever reads it.
        if file.is_err()
            && let Kept::Open(file) = self.kept()
        {
            return Ok(Some(file));
        }
        file
    }

    fn kept(&self) -> Kept {
        self.file.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// From now on its file stays open for as long as somebody holds the segment: its name may go.
    pub(crate) fn keep_open(&self) -> io::Result<()> {
        let file = self.opened()?;
        let mut kept = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *kept, Kept::Open(file));
        drop(kept);
        if let Kept::OnDemand(files) = before {
            files.take(self.id);
        }
        Ok(())
    }

    /// Its file, opened if it has to be.
    pub(crate) fn opened(&self) -> io::Result<Arc<dyn File>> {
        self.file(How::Blocking)?.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Closes its file, if only the pool keeps it open.
    pub(crate) fn close(&self) {
        if let Kept::OnDemand(files) = &*self.file.lock().unwrap_or_else(PoisonError::into_inner) {
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
        // Ignored: it is set by whoever seals the segment, and that happens once.
        let _ = self.trailer.set(trailer);
    }

    /// From now on every read by its tables fails with this.
    pub(crate) fn withhold(&self, damage: Error) {
        // Ignored: the first damage found is as good as another.
        let _ = self.withheld.set(damage);
    }

    pub(crate) fn withheld(&self) -> Option<&Error> {
        self.withheld.get()
    }

    fn check_tables(&self) -> Result<(), Error> {
        self.withheld().map_or(Ok(()), |damage| Err(damage.clone()))
    }

    pub(crate) fn damaged(&self, bytes: Range<u64>, what: &str) -> Error {
        Error::Damaged { file: self.name(), bytes, what: what.to_owned() }
    }

    /// Fills `buf`, waiting for the disk only if allowed.
    pub(crate) fn read(&self, buf: &mut [u8], offset: u64, how: How) -> Result<(), Stop> {
        let range = offset..offset + buf.len() as u64;
        if range.end > self.len {
            return Err(self.damaged(range, "lies beyond the end of the file").into());
        }
        let file = self.file(how).map_err(|e| self.open_error(&e))?;
        let result = match (file, how) {
            (None, _) | (_, How::Memory) => Ok(false),
            (Some(file), How::Cached) => file.try_read_at(buf, offset),
            (Some(file), How::Blocking) => file.read_at(buf, offset).map(|()| true),
            (Some(file), How::Passing) => file.read_device_at(buf, offset).map(|()| true),
        };
        match result {
            Ok(true) => Ok(()),
            Ok(false) => Err(Stop::WouldBlock),
            Err(e) => Err(self.read_error(range, &e).into()),
        }
    }

    /// Says that a range will be read soon.
    pub(crate) fn will_read(&self, range: Range<u64>) {
        // Ignored: the read to come will meet it.
        if let Ok(Some(file)) = self.file(How::Blocking) {
            file.will_read(range);
        }
    }

    /// Fills `buf` from the device itself.
    pub(crate) fn read_device(&self, buf: &mut [u8], offset: u64) -> Result<(), Error> {
        let range = offset..offset + buf.len() as u64;
        let file = self.opened().map_err(|e| self.open_error(&e))?;
        file.read_device_at(buf, offset).map_err(|e| self.read_error(range, &e))
    }

    /// A process may have too many files open; a file that is gone is damage.
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
        Error::Io { operation: "read", file: self.name(), reason: e.to_string() }
    }

    /// Makes a footer durable: the tables, and the trailer once those are.
    pub(crate) fn write_footer(&self, footer: &Footer) -> Result<(), Error> {
        let name = self.name();
        let file = self.opened().map_err(|e| poison("open", &name, &e))?;
        let write = |bytes: &[u8], at: u64| -> Result<(), Error> {
            let block = Aligned::copy(bytes);
            file.write_at(block.as_slice(), at).map_err(|e| poison("write", &name, &e))?;
            file.sync_data().map_err(|e| poison("sync", &name, &e))
        };
        if !footer.pages.is_empty() {
            write(&footer.pages, footer.trailer.footer_start)?;
        }
        write(&footer.trailer_block, self.len - BLOCK_BYTES)
    }

    /// The table by index. Only of a sealed segment.
    pub(crate) fn by_index<'a>(&'a self, cache: &'a PageCache, how: How) -> Rows<'a, IndexRow> {
        let table = self.trailer().map(|t| t.index).unwrap_or_default();
        Rows::new(self, cache, how, table)
    }

    /// The table by stream. Only of a sealed segment.
    pub(crate) fn by_stream<'a>(&'a self, cache: &'a PageCache, how: How) -> Rows<'a, PlacedRow> {
        let table = self.trailer().map(|t| t.streams).unwrap_or_default();
        Rows::new(self, cache, how, table)
    }

    /// The directory of streams, for what is not kept in memory of it. Only of a sealed segment.
    pub(crate) fn directory<'a>(
        &'a self,
        cache: &'a PageCache,
        how: How,
    ) -> Rows<'a, DirectoryRow> {
        let table = self.trailer().map(|t| t.directory).unwrap_or_default();
        Rows::new(self, cache, how, table)
    }

    /// A verified footer page.
    fn page(&self, cache: &PageCache, number: u32, how: How) -> Result<Bytes, Stop> {
        self.check_tables()?;
        if let Some(page) = cache.get(self.id, number) {
            return Ok(page);
        }
        let start = self.trailer().map_or(0, |t| t.footer_start);
        let offset = start + u64::from(number) * BLOCK_BYTES;
        let mut page = vec![0; BLOCK];
        self.read(&mut page, offset, how)?;
        if !page_verifies(&page, self.id, number) {
            let range = offset..offset + BLOCK_BYTES;
            return Err(self.damaged(range, "a page of the footer does not verify").into());
        }
        let page = Bytes::from(page);
        cache.put(self.id, number, page.clone());
        Ok(page)
    }
}

/// Reads rows of one footer table; neighbouring rows cost one look at the cache.
pub(crate) struct Rows<'a, R> {
    segment: &'a Segment,
    cache: &'a PageCache,
    how: How,
    table: Table,
    current: Option<(u32, Bytes)>,
    row: PhantomData<R>,
}

impl<'a, R: Row> Rows<'a, R> {
    fn new(segment: &'a Segment, cache: &'a PageCache, how: How, table: Table) -> Self {
        Self { segment, cache, how, table, current: None, row: PhantomData }
    }

    pub(crate) fn len(&self) -> u32 {
        self.table.rows
    }

    pub(crate) fn get(&mut self, row: u32) -> Result<R, Stop> {
        let per_page = R::PER_PAGE as u32;
        let number = self.table.page + row / per_page;
        let page = match &self.current {
            Some((current, page)) if *current == number => page,
            _ => {
                let page = self.segment.page(self.cache, number, self.how)?;
                &self.current.insert((number, page)).1
            }
        };
        row_of(page, (row % per_page) as usize).ok_or_else(|| {
            self.segment
                .damaged(0..self.segment.len, "a row of the footer is missing, or makes no sense")
                .into()
        })
    }

    /// First row of `range` for which `before` is false; rows for which it is true come first.
    pub(crate) fn partition_point(
        &mut self,
        range: Range<u32>,
        before: impl Fn(&R) -> bool,
    ) -> Result<u32, Stop> {
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

impl Rows<'_, IndexRow> {
    /// First row at or after `index`.
    pub(crate) fn find(&mut self, index: u64) -> Result<u32, Stop> {
        self.segment.check_tables()?;
        let Some((first, last)) = self.segment.trailer().and_then(|t| t.entries) else {
            return Ok(0);
        };
        // Without gaps the row's number follows from the index.
        if last.index - first + 1 == u64::from(self.len()) {
            let row = index.saturating_sub(first).min(u64::from(self.len()));
            return Ok(row as u32);
        }
        self.partition_point(0..self.len(), |row| row.id.index < index)
    }
}
