//! One segment file: reading its bytes, and the tables of its footer once it is sealed.
//! What the segment means to the log is kept in `log.rs`.

use std::io;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;

use crate::footer::{IndexRow, PlacedRow, Row, Table, Trailer, page_verifies, row_of};
use crate::layout::{BLOCK_BYTES, segment_name};
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

#[derive(Debug)]
pub(crate) struct Segment {
    pub id: u64,
    pub file: Arc<dyn File>,
    pub len: u64,
    /// Set once, when the footer is durable.
    trailer: OnceLock<Trailer>,
}

impl Segment {
    pub(crate) fn new(id: u64, file: Arc<dyn File>, len: u64) -> Self {
        Self { id, file, len, trailer: OnceLock::new() }
    }

    pub(crate) fn name(&self) -> String {
        segment_name(self.id)
    }

    pub(crate) fn trailer(&self) -> Option<&Trailer> {
        self.trailer.get()
    }

    pub(crate) fn set_trailer(&self, trailer: Trailer) {
        // Ignored: it is set by whoever seals the segment, and that happens once.
        let _ = self.trailer.set(trailer);
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
        let result = match how {
            How::Cached => self.file.try_read_at(buf, offset),
            How::Blocking => self.file.read_at(buf, offset).map(|()| true),
        };
        match result {
            Ok(true) => Ok(()),
            Ok(false) => Err(Stop::WouldBlock),
            Err(e) => Err(self.read_error(range, &e).into()),
        }
    }

    /// Fills `buf` from the device itself.
    pub(crate) fn read_device(&self, buf: &mut [u8], offset: u64) -> Result<(), Error> {
        let range = offset..offset + buf.len() as u64;
        self.file.read_device_at(buf, offset).map_err(|e| self.read_error(range, &e))
    }

    fn read_error(&self, bytes: Range<u64>, e: &io::Error) -> Error {
        if e.kind() == io::ErrorKind::UnexpectedEof {
            return self.damaged(bytes, "the file is shorter than it was");
        }
        Error::Io { operation: "read", file: self.name(), reason: e.to_string() }
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

    /// A verified footer page.
    fn page(&self, cache: &PageCache, number: u32, how: How) -> Result<Bytes, Stop> {
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
            self.segment.damaged(0..self.segment.len, "a footer row is missing").into()
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
