//! `helix explain`: the page of one reason, or a list of all.
//! The texts are in `reasons`; what is computed is so by the tables of the service's answers.

use helix_proto::error as wire;
use helix_proto::log::v1::{ErrorReason, HealthReason};
use schemars::JsonSchema;
use serde::Serialize;

use crate::args::Global;
use crate::exit::{Exit, Failure};
use crate::output::Output;
use crate::reasons::{self, Text};
use crate::report;

/// Numbers of reasons are below this.
const REASONS_MAX: i32 = 1000;

/// What there is to know of a reason.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Page {
    /// Name, as it stands in brackets behind an error
    reason: String,
    /// gRPC code that goes with it. Null: only `helix cluster health` gives this reason
    grpc_code: Option<String>,
    /// Whether the same request may succeed if it is sent again
    #[schemars(extend("x-wide" = true))]
    retryable: Option<bool>,
    /// Whether the request may have been applied. Null: each error says so itself
    #[schemars(extend("x-wide" = true))]
    may_have_applied: Option<bool>,
    /// What it says
    meaning: &'static str,
    /// Why it may be
    #[schemars(extend("x-wide" = true))]
    why: &'static str,
    /// What to do
    #[schemars(extend("x-wide" = true))]
    hint: &'static str,
}

pub(crate) fn run(global: &Global, reason: Option<&str>) -> anyhow::Result<()> {
    let output = Output { format: global.output };
    let pages = pages();
    let Some(asked) = reason else { return output.show(&pages) };
    let name = normal(asked);
    let found: Vec<Page> = pages.into_iter().filter(|page| page.reason == name).collect();
    if found.is_empty() {
        let failure = Failure::new(Exit::NotFound, format!("there is no reason {asked:?}"));
        return Err(failure.hint("helix explain   lists all").into());
    }
    output.show_as(&found, || found.iter().map(Page::text).collect())
}

/// `no-leader`, `ERROR_REASON_NO_LEADER` and `NO_LEADER` are the same.
fn normal(text: &str) -> String {
    let name = text.trim().to_uppercase().replace('-', "_");
    name.trim_start_matches("ERROR_REASON_").trim_start_matches("HEALTH_REASON_").to_owned()
}

/// Of every reason that this version knows.
pub(crate) fn pages() -> Vec<Page> {
    let errors = (1..REASONS_MAX).filter_map(|number| ErrorReason::try_from(number).ok());
    let mut pages: Vec<Page> = errors.map(of_error).collect();
    let findings = (1..REASONS_MAX).filter_map(|number| HealthReason::try_from(number).ok());
    pages.extend(findings.filter_map(|reason| {
        let name = reason.as_str_name().trim_start_matches("HEALTH_REASON_");
        reasons::of_health(reason).map(|text| Page::new(name.to_owned(), text))
    }));
    let silence = [tonic::Code::Unavailable, tonic::Code::DeadlineExceeded];
    pages.extend(silence.map(|code| Page {
        grpc_code: Some(report::screaming(code)),
        retryable: Some(true),
        ..Page::new(report::screaming(code), reasons::of_silence())
    }));
    pages
}

fn of_error(reason: ErrorReason) -> Page {
    let detail = wire::detail(reason);
    Page {
        grpc_code: Some(report::screaming(wire::code(reason))),
        retryable: Some(detail.retryable),
        // A failed disk leaves some open and some not.
        may_have_applied: Some(detail.may_have_applied)
            .filter(|_| reason != ErrorReason::StorageFailed),
        ..Page::new(wire::reason_name(reason).to_owned(), reasons::of(reason))
    }
}

impl Page {
    fn new(reason: String, Text { meaning, why, hint }: Text) -> Self {
        let (grpc_code, retryable, may_have_applied) = (None, None, None);
        Self { reason, grpc_code, retryable, may_have_applied, meaning, why, hint }
    }

    fn text(&self) -> String {
        let mut text = format!("{}: {}\n\n  why: {}\n", self.reason, self.meaning, self.why);
        text += &format!("  try: {}\n", self.hint.replace('\n', "\n       "));
        let Some(code) = &self.grpc_code else {
            return text + "\n  said by helix cluster health\n";
        };
        let again = match self.retryable {
            Some(true) => "may succeed",
            _ => "fails until something is changed",
        };
        let applied = match self.may_have_applied {
            Some(true) => "may have been applied",
            Some(false) => "was not applied",
            None => "may have been applied: the error says so",
        };
        text +=
            &format!("\n  gRPC code {code}; the same request again {again}; a write {applied}\n");
        text
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use helix_proto::FILE_DESCRIPTOR_SET;
    use prost_types::FileDescriptorSet;

    use super::*;

    /// Names of the values of an enum of the protos, without its prefix and its zero.
    fn values(name: &str, prefix: &str) -> BTreeSet<String> {
        let files: FileDescriptorSet = prost::Message::decode(FILE_DESCRIPTOR_SET).unwrap();
        let enums = files.file.iter().flat_map(|file| &file.enum_type);
        let found = enums.into_iter().find(|it| it.name() == name).unwrap();
        let names = found.value.iter().filter(|value| value.number() != 0);
        names.map(|value| value.name().trim_start_matches(prefix).to_owned()).collect()
    }

    #[test]
    fn every_reason_of_the_contract_has_a_page() {
        let pages: BTreeSet<String> = pages().into_iter().map(|page| page.reason).collect();
        let errors = values("ErrorReason", "ERROR_REASON_");
        assert!(errors.len() > 30, "{errors:?}");
        assert_eq!(errors.difference(&pages).collect::<Vec<_>>(), Vec::<&String>::new());
        let health = values("HealthReason", "HEALTH_REASON_");
        assert_eq!(health.difference(&pages).collect::<Vec<_>>(), Vec::<&String>::new());
    }

    #[test]
    fn pages_say_what_why_and_what_to_do_and_no_two_say_the_same() {
        let pages = pages();
        for page in &pages {
            for part in [page.meaning, page.why, page.hint] {
                assert!(part.len() > 8, "{page:?}");
            }
            assert!(page.text().contains("\n  try: "), "{page:?}");
        }
        let explained = pages.iter().filter(|page| page.reason != "DEADLINE_EXCEEDED");
        let meanings: BTreeSet<_> = explained.clone().map(|page| page.meaning).collect();
        assert_eq!(meanings.len(), explained.count());
    }

    #[test]
    fn a_reason_is_found_however_it_is_written() {
        for text in ["NO_LEADER", "no_leader", "no-leader", "ERROR_REASON_NO_LEADER"] {
            assert_eq!(normal(text), "NO_LEADER");
        }
    }
}
