package matrix

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
)

// Outcome is what became of a cell.
type Outcome string

const (
	// Passed: each step did what it is to do, and the judgement of what was produced and handled found nothing.
	Passed Outcome = "passed"
	// Failed: it did not.
	Failed Outcome = "failed"
	// Unfit: the query mode needs what the pooler does not have; it was shown that it fails, and how.
	Unfit Outcome = "unfit"
)

// CellResult is the outcome of a cell.
type CellResult struct {
	// Server is a version of PostgreSQL, Way "direct" or a pooler, Mode a query mode of pgx.
	Server string `json:"server"`
	Way    string `json:"way"`
	Mode   string `json:"mode"`
	// Synchronous is the server's synchronous_commit.
	Synchronous bool    `json:"synchronous_commit"`
	Outcome     Outcome `json:"outcome"`
	// Code is the SQLSTATE that shows that it is Unfit, Error what failed.
	Code  string `json:"code,omitempty"`
	Error string `json:"error,omitempty"`
	// Handled is how many messages were handled.
	Handled int     `json:"handled"`
	Seconds float64 `json:"seconds"`
}

// SuiteResult is the outcome of the scenarios of the fence on a server.
type SuiteResult struct {
	Server string `json:"server"`
	Passed int    `json:"passed"`
	Failed int    `json:"failed"`
	Error  string `json:"error,omitempty"`
}

// Result is the outcome of a run of the matrix.
type Result struct {
	// Date is its day, Pgx the driver's version.
	Date    string   `json:"date"`
	Pgx     string   `json:"pgx"`
	Servers []string `json:"servers"`
	// Ways are "direct", and the poolers.
	Ways  []string      `json:"ways"`
	Modes []string      `json:"modes"`
	Fence []SuiteResult `json:"fence"`
	Cells []CellResult  `json:"cells"`
}

// sort puts the cells into the order of servers, ways and modes.
func (r *Result) sort() {
	slices.SortFunc(r.Cells, func(a, b CellResult) int {
		return cmp.Or(
			slices.Index(r.Servers, a.Server)-slices.Index(r.Servers, b.Server),
			slices.Index(r.Ways, a.Way)-slices.Index(r.Ways, b.Way),
			slices.Index(r.Modes, a.Mode)-slices.Index(r.Modes, b.Mode),
			strings.Compare(fmt.Sprint(b.Synchronous), fmt.Sprint(a.Synchronous)))
	})
}

// OK reports whether nothing failed.
func (r *Result) OK() bool {
	return !slices.ContainsFunc(r.Cells, func(c CellResult) bool { return c.Outcome == Failed }) &&
		!slices.ContainsFunc(r.Fence, func(s SuiteResult) bool { return s.Failed > 0 || s.Passed == 0 })
}

// count gives how many cells ended so.
func (r *Result) count(o Outcome) (n int) {
	for _, c := range r.Cells {
		if c.Outcome == o {
			n++
		}
	}
	return n
}

// word is what the tables say of a way and mode on a server: its cells are taken together.
func (r *Result) word(server, way, mode string, code func(string) string) string {
	word := "-"
	for _, c := range r.Cells {
		if c.Server != server || c.Way != way || c.Mode != mode {
			continue
		}
		switch {
		case c.Outcome == Failed:
			return "FAILED"
		case c.Outcome == Unfit:
			word = code(c.Code)
		case word == "-":
			word = "works"
		}
	}
	return word
}

// rows are those of the tables, their heads first.
func (r *Result) rows(name, code func(string) string) (rows [][]string) {
	rows = append(rows, append([]string{"", name("default_query_exec_mode")}, r.Servers...))
	for _, way := range r.Ways {
		for i, mode := range r.Modes {
			row := []string{"", name(mode)}
			if i == 0 {
				row[0] = way
			}
			for _, server := range r.Servers {
				row = append(row, r.word(server, way, mode, code))
			}
			rows = append(rows, row)
		}
	}
	fence := []string{name("TestFence"), ""}
	for _, s := range r.Fence {
		word := fmt.Sprint(s.Passed, " passed")
		if s.Failed > 0 || s.Passed == 0 {
			word = fmt.Sprint(s.Failed, " FAILED")
		}
		fence = append(fence, word)
	}
	return append(rows, fence)
}

// Table writes the table for a terminal.
func (r *Result) Table(w io.Writer) error {
	same := func(s string) string { return s }
	out := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, row := range r.rows(same, same) {
		fmt.Fprintln(out, strings.Join(row, "\t"))
	}
	fmt.Fprintf(out, "%d cells passed, %d failed, %d unfit\n", r.count(Passed), r.count(Failed), r.count(Unfit))
	return out.Flush()
}

// Markdown is the part of docs/operations.md.
func (r *Result) Markdown() string {
	quoted := func(s string) string { return "`" + s + "`" }
	var b strings.Builder
	fmt.Fprintf(&b, "On %s, with pgx %s: %d cells that work, %d failed. A code says that the mode needs what the pooler does not have, and how it fails.\n\n",
		r.Date, r.Pgx, r.count(Passed), r.count(Failed))
	for i, row := range r.rows(quoted, quoted) {
		if i == 0 {
			for j := 2; j < len(row); j++ {
				row[j] = "PostgreSQL " + row[j]
			}
		}
		fmt.Fprintf(&b, "| %s |\n", strings.Join(row, " | "))
		if i == 0 {
			b.WriteString("|" + strings.Repeat("---|", len(row)) + "\n")
		}
	}
	return b.String()
}

// JSON is the result as a file, a cell a line.
func (r *Result) JSON() []byte {
	cells := r.Cells
	var b strings.Builder
	r.Cells = nil
	head, _ := json.MarshalIndent(r, "", "  ") // it has nothing that could not be marshalled
	r.Cells = cells
	b.WriteString(strings.TrimSuffix(string(head), "null\n}") + "[")
	for i, c := range cells {
		line, _ := json.Marshal(c)
		if i > 0 {
			b.WriteString(",")
		}
		b.WriteString("\n    " + string(line))
	}
	b.WriteString("\n  ]\n}\n")
	return []byte(b.String())
}
