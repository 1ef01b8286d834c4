package torture

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/weirhq/weir/internal/history"
	"github.com/weirhq/weir/internal/pgtest"
	"github.com/weirhq/weir/sql/testdata"
)

// asChild makes the test binary a process of a torture.
const asChild = "WEIR_TORTURE_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(asChild) != "" {
		if err := Child(context.Background(), os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(pgtest.Main(m))
}

func itself() (*exec.Cmd, error) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), asChild+"=1", "GORACE=atexit_sleep_ms=0")
	return cmd, nil
}

// seeded gives the seed of a torture: WEIR_SEED, or a new one, which it prints.
func seeded(t *testing.T) uint64 {
	t.Helper()
	seed := uint64(time.Now().UnixNano()) % 1_000_000
	if s := os.Getenv("WEIR_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatalf("WEIR_SEED: %v", err)
		}
	}
	fmt.Printf("%s: replay with WEIR_SEED=%d\n", t.Name(), seed)
	return seed
}

func tortured(t *testing.T, o Options) *Report {
	t.Helper()
	o.Child, o.Out = itself, os.Stderr
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	var text bytes.Buffer
	r.Print(&text)
	t.Logf("\n%s", text.String())
	return r
}

// TestTorture runs everything at a small rate, until faults of at least fifteen kinds were made; with WEIR_LONG ten minutes at full
// rate. Nothing may be violated.
func TestTorture(t *testing.T) {
	o := Options{For: 12 * time.Second, Rate: 400, Pace: 3, Kinds: 15}
	if os.Getenv("WEIR_LONG") != "" {
		o = Options{For: 10 * time.Minute, Kinds: 15}
	}
	o.Seed = seeded(t)
	r := tortured(t, o)
	for _, v := range r.Violations {
		t.Errorf("%s", v)
	}
	kinds := 0
	for _, f := range r.Faults {
		if f.Count > 0 {
			kinds++
		}
	}
	if !r.OK || kinds < o.Kinds {
		t.Errorf("violated: %v; faults of %d kinds, want %d", r.Violated, kinds, o.Kinds)
	}
	if r.Messages == 0 || r.Acknowledged == 0 {
		t.Errorf("%d messages, %d acknowledged leases", r.Messages, r.Acknowledged)
	}
	for _, g := range r.Groups {
		// A dead letter is not handled.
		if g.Handled == 0 || g.Lost > 0 || g.Once && g.Effects == 0 {
			t.Errorf("group %s: handled %d, lost %d, %d effects", g.Group, g.Handled, g.Lost, g.Effects)
		}
	}

	folder := t.TempDir()
	if err := r.Write(folder); err != nil {
		t.Fatal(err)
	}
	var again Report
	text, err := os.ReadFile(filepath.Join(folder, "report.json"))
	if err == nil {
		err = json.Unmarshal(text, &again)
	}
	if err != nil || again.Messages != r.Messages || len(again.Happened) != r.FaultCount {
		t.Errorf("report.json: %v, %d messages of %d, %d faults of %d", err, again.Messages, r.Messages, len(again.Happened), r.FaultCount)
	}
	page, err := os.ReadFile(filepath.Join(folder, "index.html"))
	if err != nil || strings.Count(string(page), "<svg") != 4 || !strings.Contains(string(page), "no violations") {
		t.Errorf("index.html: %v\n%.2000s", err, page)
	}
}

// TestBreak: a bug that was seeded is found.
func TestBreak(t *testing.T) {
	r := tortured(t, Options{For: 8 * time.Second, Rate: 1500, Pace: 3, Break: "raw-head", Seed: seeded(t)})
	if r.OK || r.Violated[history.Lost]+r.Violated[history.Skip] == 0 || len(r.Violations) == 0 {
		t.Errorf("violated: %v", r.Violated)
	}
}

// TestBugNames: what can be seeded stands in the catalogue, and can be put into the SQL.
func TestBugNames(t *testing.T) {
	list, err := testdata.Bugs()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range BugNames() {
		if !slices.ContainsFunc(list, func(b testdata.Bug) bool { return b.Name == name }) {
			t.Errorf("there is no bug %s", name)
		} else if texts, err := breakIt(name); err != nil || len(texts) == 0 {
			t.Errorf("%s: %d files, %v", name, len(texts), err)
		}
	}
}

// TestRecord: a record holds what was added, up to what was not written to its end.
func TestRecord(t *testing.T) {
	path := recordPath(t.TempDir(), 7)
	rec, err := newRecorder(path, time.Now().UnixMicro(), 7)
	if err != nil {
		t.Fatal(err)
	}
	want := []entry{
		{kind: entryStarted, proc: 7, time: 12, where: 2, own: true, items: []item{{value: makeValue(3, 7, 1)}, {value: makeValue(3, 7, 2)}}},
		{kind: entryBegin, proc: 7, time: 13, where: 4, items: []item{
			{value: 9, id: 100, attempt: 2, lease: "5/6", wrongKey: "k"}, {value: 4, id: 90, attempt: 1, lease: "5/6", ok: true}, {value: 1, id: 91, ok: true},
		}},
		{kind: entryEffect, proc: 12, time: 14, where: 1, items: []item{{value: -1, id: 1 << 50, lease: strings.Repeat("x", 300)}}},
	}
	for _, e := range want {
		if err := rec.add(e); err != nil {
			t.Fatal(err)
		}
	}
	for _, cut := range []int64{0, 1, 5} {
		size, err := rec.file.Seek(0, 2)
		if err == nil {
			err = rec.file.Truncate(size - cut)
		}
		if err != nil {
			t.Fatal(err)
		}
		var got []entry
		if err := readRecord(path, func(e *entry) error {
			c := *e
			c.items = slices.Clone(e.items)
			got = append(got, c)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		wanted := want
		if cut > 0 {
			wanted = want[:2]
		}
		if !reflect.DeepEqual(got, wanted) {
			t.Errorf("with %d bytes cut off:\ngot  %+v\nwant %+v", cut, got, wanted)
		}
	}
	if era := eraOf(makeValue(3, 7, 1<<seqBits-1)); era != 3 {
		t.Errorf("the era is %d", era)
	}
}

// TestFaultNames: each kind is described, and is drawn by a lane.
func TestFaultNames(t *testing.T) {
	seen := map[string]bool{}
	for _, k := range kinds {
		seen[k.name] = true
		if k.what == "" || k.weight < 1 || k.lane < 0 || k.lane >= lanes || k.do == nil {
			t.Errorf("%+v", k)
		}
	}
	if len(seen) != len(kinds) || len(kinds) < 12 {
		t.Errorf("%d kinds with %d names: %v", len(kinds), len(seen), slices.Sorted(maps.Keys(seen)))
	}
}

// TestStatements: each file of the folder sql has a caller, and each one that is named is there.
func TestStatements(t *testing.T) {
	sources, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	named := map[string]bool{}
	for _, name := range sources {
		source, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`\btext\([\w."]+, "(\w+)"\)`).FindAllSubmatch(source, -1) {
			named[string(m[1])] = true
			text("weir", string(m[1])) // panics where there is none
		}
	}
	entries, err := files.ReadDir("sql")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !named[strings.TrimSuffix(e.Name(), ".sql")] {
			t.Errorf("sql/%s has no caller", e.Name())
		}
	}
}
