package demo

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weirhq/weir/internal/history"
)

// Verdict is what a run comes to. Messages are counted by what the ledger and the log hold at the end, and by what the
// handlers put on record.
type Verdict struct {
	// OK: nothing was lost, nothing was handled that was not committed, and nothing else is wrong.
	OK      bool `json:"ok"`
	Lost    int  `json:"lost"`
	Phantom int  `json:"phantom"`
	// Problems says what else is wrong.
	Problems []string `json:"problems,omitempty"`

	Server string `json:"server"`
	Topic  string `json:"topic"`
	Seed   uint64 `json:"seed"`
	// Folder is where the record of the handlers was kept, with Options.Keep.
	Folder       string  `json:"folder,omitempty"`
	Seconds      float64 `json:"seconds"`
	EndedEarly   bool    `json:"ended_early"`
	Drained      bool    `json:"drained"`
	DrainSeconds float64 `json:"drain_seconds"`

	// Produced messages are committed, in Transactions; RolledBack ones are not.
	Produced               int     `json:"produced"`
	Transactions           int     `json:"transactions"`
	RolledBack             int     `json:"rolled_back"`
	RolledBackTransactions int     `json:"rolled_back_transactions"`
	HeldOpen               int     `json:"held_open"`
	LongestHeldSeconds     float64 `json:"longest_held_seconds"`

	Groups []GroupVerdict `json:"groups"`
	Kills  []Kill         `json:"kills"`
	// Naive is what a reader with "id > cursor order by id" made of the same log. It is no part of the verdict.
	Naive NaiveVerdict `json:"naive_reader"`
}

// GroupVerdict is what one group did.
type GroupVerdict struct {
	Group string `json:"group"`
	// Handled counts messages, Redelivered handlings of a message after its first.
	Handled     int `json:"handled"`
	Redelivered int `json:"redelivered"`
	Lost        int `json:"lost"`
	Phantom     int `json:"phantom"`
	// The delay of a message is from its commit to the end of its first good handling.
	MedianDelaySeconds  float64 `json:"median_delay_seconds"`
	LongestDelaySeconds float64 `json:"longest_delay_seconds"`
}

// Kill is a consumer's process that was killed.
type Kill struct {
	PID   int    `json:"pid"`
	Group string `json:"group"`
	// Held is how many messages it had, which others took over.
	Held           int     `json:"held"`
	TakenOver      bool    `json:"taken_over"`
	TakenOverAfter float64 `json:"taken_over_after_seconds"`
}

// NaiveVerdict is what the naive reader saw.
type NaiveVerdict struct {
	Read    int `json:"read"`
	Skipped int `json:"skipped"`
}

// stored is a message as the database has it: once in the log, once in the ledger.
type stored struct {
	id                 *int64
	entry, key         *string
	bookedID           *int64
	booked, bookedWith *string
}

// judge reads everything and judges it.
func (d *demo) judge(v *Verdict) error {
	ctx, cancel := context.WithTimeout(d.life, 2*time.Minute)
	defer cancel()
	rows, err := d.pool.Query(ctx, d.text("entries"))
	if err != nil {
		return err
	}
	committed, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (s stored, err error) {
		return s, row.Scan(&s.id, &s.entry, &s.key, &s.bookedID, &s.booked, &s.bookedWith)
	})
	if err != nil {
		return err
	}
	paths, err := filepath.Glob(filepath.Join(d.folder, "*.ndjson"))
	if err != nil {
		return err
	}
	var record []history.Event
	known := map[string]string{} // each text once: the record says the same ones over and over
	same := func(s *string) {
		if k, is := known[*s]; is {
			*s = k
		} else {
			known[*s] = *s
		}
	}
	for _, path := range paths {
		events, err := readRecord(path)
		if err != nil {
			return fmt.Errorf("%s: %w", filepath.Base(path), err)
		}
		for i := range events {
			e := &events[i]
			for _, s := range []*string{&e.Topic, &e.Group, &e.By, &e.Value, &e.Key} {
				same(s)
			}
		}
		record = append(record, events...)
	}
	if err := d.rec.Err(); err != nil {
		return fmt.Errorf("the record of the producers: %w", err)
	}
	v.Server, v.Topic, v.Seed = d.server, d.topic, d.o.Seed
	if d.o.Keep {
		v.Folder = d.folder
	}
	v.weigh(d.topic, committed, history.Merge(record))

	d.naive.mu.Lock()
	seen := make(map[int64]bool, len(d.naive.seen))
	for _, id := range d.naive.seen {
		seen[id] = true
	}
	d.naive.mu.Unlock()
	v.Naive.Read = len(seen)
	for _, s := range committed {
		if s.id != nil && !seen[*s.id] {
			v.Naive.Skipped++
		}
	}
	d.state.mu.Lock()
	defer d.state.mu.Unlock()
	v.HeldOpen, v.LongestHeldSeconds = d.state.count, seconds(d.state.longest)
	v.Kills = slices.Clone(d.state.kills)
	return nil
}

func readRecord(path string) ([]history.Event, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return history.Read(f)
}

// weigh sets the record, which it uses up, against what is committed.
//
// Of what the producers recorded only the beginnings count, and when a commit was over. Whether a message exists is for the
// database to say.
func (v *Verdict) weigh(topic string, committed []stored, record []history.Event) {
	problems := map[string]int{}
	exists := make(map[string]int64, len(committed))
	transactions := map[string]bool{}
	for _, s := range committed {
		switch {
		case s.booked == nil:
			problems["messages in the log whose ledger entry is missing"]++
		case s.entry == nil:
			problems["ledger entries whose message is missing in the log"]++
		case *s.entry != *s.booked || s.key == nil || *s.key != *s.bookedWith:
			problems["messages that differ from their ledger entry"]++
		}
		// In either place it was committed: then every group must have it.
		if name := cmp.Or(s.booked, s.entry); name != nil {
			exists[*name] = *cmp.Or(s.bookedID, s.id)
			transactions[transactionOf(*name)] = true
		}
	}
	v.Produced, v.Transactions = len(exists), len(transactions)

	started := map[string]bool{}
	endOf := map[string]int64{} // value -> when its commit was over
	rolledBack := map[string]bool{}
	last := int64(0)
	for _, e := range record {
		last = max(last, e.Time)
		id, is := exists[e.Value]
		switch e.Kind {
		case history.KindProduceStarted:
			started[e.Value] = true
			if !is {
				rolledBack[transactionOf(e.Value)] = true
				v.RolledBack++
			}
		case history.KindProduced:
			endOf[e.Value] = e.Time
			if !is || id != e.ID {
				problems["messages whose commit was confirmed and that are missing"]++
			}
		case history.KindProduceFailed:
			if is {
				problems["messages that were rolled back and exist"]++
			}
		}
	}
	delays := delays(record, endOf)
	events := slices.DeleteFunc(record, func(e history.Event) bool {
		return e.Kind == history.KindProduced || e.Kind == history.KindProduceFailed || e.Kind == history.KindProduceUnknown
	})
	v.RolledBackTransactions = len(rolledBack)
	for value := range started {
		id, is := exists[value]
		events = append(events, history.Event{Kind: history.KindResolved, Value: value, OK: is, ID: id, Time: last + 1})
	}
	for value := range exists {
		if !started[value] {
			problems["messages that nobody produced"]++
		}
	}

	o := history.Options{AllowDuplicates: true, Slack: 10 * time.Millisecond, Keep: 10 * MaxMessages, Topics: map[string]string{}}
	for _, g := range groups {
		o.Groups = append(o.Groups, g.name)
		o.Topics[g.name] = topic
	}
	report := history.Judge(events, o)
	phantoms := map[string]int{}
	for _, violation := range report.Violations {
		switch violation.Kind {
		case history.Lost:
		case history.Phantom:
			phantoms[violation.Group]++
		default:
			problems[string(violation.Kind)+": "+violation.Message]++
		}
	}
	v.Lost, v.Phantom = report.Lost, report.Violated[history.Phantom]
	for _, g := range groups {
		r := report.Groups[g.name]
		if r == nil {
			r = &history.GroupReport{Lost: len(exists)}
			v.Lost += len(exists)
		}
		verdict := GroupVerdict{Group: g.name, Handled: r.Distinct, Redelivered: r.Redelivered, Lost: r.Lost, Phantom: phantoms[g.name]}
		if all := delays[g.name]; len(all) > 0 {
			slices.Sort(all)
			verdict.MedianDelaySeconds = seconds(all[len(all)/2])
			verdict.LongestDelaySeconds = seconds(all[len(all)-1])
		}
		v.Groups = append(v.Groups, verdict)
	}
	for text, n := range problems {
		if n > 1 {
			text = fmt.Sprintf("%s %s", number(n), text)
		}
		v.Problems = append(v.Problems, text)
	}
	slices.Sort(v.Problems)
	v.OK = v.Lost == 0 && v.Phantom == 0 && len(v.Problems) == 0
}

// transactionOf is what is common to the entries of one transaction.
func transactionOf(entry string) string { return entry[:max(strings.LastIndexByte(entry, '-'), 0)] }

// delays are those of the messages of each group.
func delays(record []history.Event, endOf map[string]int64) map[string][]time.Duration {
	all := map[string][]time.Duration{}
	type place struct {
		group string
		id    int64
	}
	values := map[place]string{}
	for _, e := range record {
		at := place{e.Group, e.ID}
		switch {
		case e.Kind == history.KindHandleStarted:
			if _, known := values[at]; !known {
				values[at] = e.Value
			}
		case e.Kind == history.KindHandleEnded && e.OK && values[at] != "":
			if end, known := endOf[values[at]]; known {
				all[e.Group] = append(all[e.Group], time.Duration(max(0, e.Time-end)))
			}
			values[at] = "" // the first counts
		}
	}
	return all
}

// Print writes the verdict as a table, in the colours that terminal has. The last line is what was lost, and nothing else if
// nothing else is wrong.
func (v Verdict) Print(w, terminal io.Writer) {
	out := colored(w, terminal)
	p := func(format string, args ...any) { fmt.Fprintf(out, format+"\n", args...) }
	p("%s", bold.Render("verdict")+dim.Render(fmt.Sprintf("  of what the database holds and the handlers put on record; seed %d", v.Seed)))
	p("")
	p("  %-12s %9s messages in %s", "committed", number(v.Produced), plural(v.Transactions, "transaction", "transactions"))
	p("  %-12s %9s messages in %s", "rolled back", number(v.RolledBack), plural(v.RolledBackTransactions, "transaction", "transactions"))
	if v.HeldOpen > 0 {
		p("  %-12s %9s, for up to %.1f s, while others overtook", "held open", plural(v.HeldOpen, "transaction", "transactions"), v.LongestHeldSeconds)
	}
	for _, k := range v.Kills {
		text := "it held nothing"
		switch {
		case k.TakenOver:
			text = fmt.Sprintf("its %s taken over %.1f s later", plural(k.Held, "message was", "messages were"), k.TakenOverAfter)
		case k.Held > 0:
			text = fmt.Sprintf("its %s not taken over", plural(k.Held, "message was", "messages were"))
		}
		p("  %-12s process %d of %s: %s", "killed", k.PID, k.Group, text)
	}
	if len(v.Kills) == 0 {
		p("  %-12s no consumer: the run ended too early", "killed")
	}
	p("")
	p("%s", dim.Render(fmt.Sprintf("  %-12s %9s %12s %8s %8s %13s %13s", "group", "handled", "redelivered", "lost", "phantom", "median delay", "longest delay")))
	for _, g := range v.Groups {
		p("  %-12s %9s %12s %s %s %11.3f s %11.3f s", g.Group, number(g.Handled), number(g.Redelivered),
			count(g.Lost, 8), count(g.Phantom, 8), g.MedianDelaySeconds, g.LongestDelaySeconds)
	}
	p("")
	p("  %-12s %9s %12s %s   %s", "naive reader", number(v.Naive.Read), "", bad.Render(fmt.Sprintf("%8s", number(v.Naive.Skipped))),
		dim.Render(`skipped: "id > cursor", no part of the verdict`))
	p("")
	if !v.Drained {
		p("  not everything was handled within %v", drainLimit)
	}
	for i, text := range v.Problems {
		if i == 10 {
			p("  and %d more", len(v.Problems)-i)
			break
		}
		p("  %s", bad.Render(text))
	}
	if v.Folder != "" {
		p("  kept: topic %s, its ledger, and the record in %s", v.Topic, v.Folder)
	}
	last := "lost " + number(v.Lost)
	if v.Phantom > 0 {
		last += ", phantom " + number(v.Phantom)
	}
	if n := len(v.Problems); n > 0 {
		last += ", other problems " + number(n)
	}
	if v.OK {
		p("%s", good.Bold(true).Render(last))
	} else {
		p("%s", bad.Bold(true).Render(last))
	}
}

func count(n, width int) string {
	text := fmt.Sprintf("%*s", width, number(n))
	if n > 0 {
		return bad.Render(text)
	}
	return text
}
