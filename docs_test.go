package weir_test

import (
	"context"
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weirhq/weir"
	"github.com/weirhq/weir/internal/pgtest"
	"github.com/weirhq/weir/sql"
)

// This file holds the documents to what they say: what they show is run, what they name exists.

var update = flag.Bool("update", false, "write what docs/sql.md's statements print into it, instead of comparing")

// block is a fenced block of a document.
type block struct {
	language, text string
	line           int // of its opening fence, from 1
	end            int // of its closing fence
}

func readDocument(t *testing.T, file string) (lines []string, blocks []block) {
	t.Helper()
	text, err := os.ReadFile(file)
	noError(t, err)
	lines = strings.Split(string(text), "\n")
	open := -1
	for i, line := range lines {
		fence, found := strings.CutPrefix(line, "```")
		switch {
		case !found:
		case open < 0:
			open = i
			blocks = append(blocks, block{language: fence, line: i + 1})
		default:
			b := &blocks[len(blocks)-1]
			b.text, b.end = strings.Join(lines[open+1:i], "\n")+"\n", i+1
			open = -1
		}
	}
	if open >= 0 {
		t.Fatalf("%s:%d: the block is not closed", file, open+1)
	}
	return lines, blocks
}

// TestSQLDocument runs the statements of docs/sql.md, block by block, in an empty database with Weir in it. A block of output
// that follows one of statements is what psql prints for it.
func TestSQLDocument(t *testing.T) {
	const file = "docs/sql.md"
	lines, blocks := readDocument(t, file)
	server := pgtest.Shared(t)
	_, dsn := open(t, &weir.Options{NoMaintenance: true})
	t.Cleanup(func() {
		// Roles belong to the server, and what they were granted to the database.
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		conn, err := pgx.Connect(ctx, dsn)
		if err == nil {
			_, err = conn.Exec(ctx, "drop owned by shop; drop role shop")
			_ = conn.Close(ctx)
		}
		if err != nil {
			t.Logf("dropping the role shop: %v", err)
		}
	})

	ran := 0
	var replaced []block
	for i, b := range blocks {
		if b.language != "sql" {
			continue
		}
		ran++
		cmd := server.Command("psql", "-X", "-q", "-v", "SHOW_CONTEXT=never", dsn)
		cmd.Stdin = strings.NewReader(b.text)
		var stdout, stderr strings.Builder
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		noError(t, cmd.Run())
		got := trimmed(stdout.String() + stderr.String())
		follows := i+1 < len(blocks) && blocks[i+1].language == "text" && strings.TrimSpace(strings.Join(lines[b.end:blocks[i+1].line-1], "")) == ""
		switch {
		case !follows && stderr.Len() > 0:
			t.Fatalf("%s:%d: %s", file, b.line, stderr.String())
		case follows && *update:
			out := blocks[i+1]
			out.text = got
			replaced = append(replaced, out)
		case follows && got != trimmed(blocks[i+1].text):
			t.Fatalf("%s:%d: the document says\n%s\nit printed\n%s", file, b.line, blocks[i+1].text, got)
		}
	}
	if ran < 10 {
		t.Errorf("%s has only %d blocks of SQL", file, ran)
	}
	if *update {
		slices.Reverse(replaced)
		for _, b := range replaced {
			lines = slices.Replace(lines, b.line, b.end-1, strings.Split(strings.TrimSuffix(b.text, "\n"), "\n")...)
		}
		noError(t, os.WriteFile(file, []byte(strings.Join(lines, "\n")), 0o644))
	}
}

// trimmed is a text without the blanks that psql ends its lines with, and without empty lines at its end.
func trimmed(text string) string {
	lines := strings.Split(text, "\n")
	for i := range lines {
		lines[i] = strings.TrimRight(lines[i], " ")
	}
	return strings.TrimRight(strings.Join(lines, "\n"), "\n") + "\n"
}

// TestSQLDocumentNamesEveryFunction: each function stands in docs/sql.md, with the arguments it has, or among those that are
// not for calling.
func TestSQLDocumentNamesEveryFunction(t *testing.T) {
	const file = "docs/sql.md"
	_, blocks := readDocument(t, file)
	signature := regexp.MustCompile(`(?m)^weir\.(\w+)\(`)
	documented := map[string][]string{}
	for _, b := range blocks {
		if b.language != "" {
			continue
		}
		for _, at := range signature.FindAllStringSubmatchIndex(b.text, -1) {
			documented[b.text[at[2]:at[3]]] = argumentNames(b.text[at[1]:])
		}
	}
	text, err := os.ReadFile(file)
	noError(t, err)
	_, inner, found := strings.Cut(string(text), "\n## Not for calling\n")
	if !found {
		t.Fatalf("%s has no section \"Not for calling\"", file)
	}
	inner, _, _ = strings.Cut(inner, "\n## ")

	_, dsn := open(t, nil)
	conn := connect(t, dsn)
	names := column[string](t, conn, "select proname::text from pg_proc where pronamespace = 'weir'::regnamespace order by 1")
	for _, name := range names {
		want, public := documented[name]
		if !public {
			if !strings.Contains(inner, "`"+name+"`") {
				t.Errorf("%s does not name the function %s", file, name)
			}
			continue
		}
		got := column[string](t, conn, `
			select a.name from pg_proc as p
			cross join unnest(p.proargnames) with ordinality as a (name, position)
			where p.pronamespace = 'weir'::regnamespace and p.proname = $1
			  and coalesce(p.proargmodes[a.position], 'i') = 'i'
			order by a.position`, name)
		if !slices.Equal(got, want) {
			t.Errorf("%s gives weir.%s the arguments %v, it has %v", file, name, want, got)
		}
	}
	for name := range documented {
		if !slices.Contains(names, name) {
			t.Errorf("%s names weir.%s, which does not exist", file, name)
		}
	}
}

// argumentNames reads a list of arguments up to its closing bracket.
func argumentNames(text string) (names []string) {
	depth, begin := 0, true
	for i, r := range text {
		switch {
		case r == ')' && depth == 0:
			return names
		case r == '(' || r == '[':
			depth++
		case r == ')' || r == ']':
			depth--
		case r == ',' && depth == 0:
			begin = true
		case begin && r != ' ' && r != '\n':
			names = append(names, strings.Fields(text[i:])[0])
			begin = false
		}
	}
	return names
}

// TestSQLDocumentNamesEveryState: the table of SQLSTATEs is that of the errors that the functions raise.
func TestSQLDocumentNamesEveryState(t *testing.T) {
	raised := map[string]bool{}
	state := regexp.MustCompile(`errcode = '(WE\d{3})'`)
	for _, f := range sql.List("functions") {
		for _, m := range state.FindAllStringSubmatch(sql.Text(sql.DefaultSchema, f), -1) {
			raised[m[1]] = true
		}
	}
	text, err := os.ReadFile("docs/sql.md")
	noError(t, err)
	listed := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `(WE\\d{3})` \\|").FindAllStringSubmatch(string(text), -1) {
		listed[m[1]] = true
		if !raised[m[1]] {
			t.Errorf("docs/sql.md lists %s, which nothing raises", m[1])
		}
	}
	for s := range raised {
		if !listed[s] {
			t.Errorf("docs/sql.md does not list %s", s)
		}
	}
}

// TestReadmeProgram: the program that README shows is examples/hello, which a test runs.
func TestReadmeProgram(t *testing.T) {
	program, err := os.ReadFile("examples/hello/main.go")
	noError(t, err)
	if n := strings.Count(string(program), "\n"); n > 30 {
		t.Errorf("examples/hello/main.go has %d lines, the shortest program is to have at most 30", n)
	}
	_, blocks := readDocument(t, "README.md")
	if !slices.ContainsFunc(blocks, func(b block) bool { return b.language == "go" && b.text == string(program) }) {
		t.Error("no block of README.md equals examples/hello/main.go")
	}
}

var markdownLink = regexp.MustCompile(`\]\(([^)#\s]+)(#[^)\s]*)?\)`)

// TestLinks: each relative link in a document leads to a file.
func TestLinks(t *testing.T) {
	n := 0
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/decisions/*.md", "bench/*.md"} {
		files, err := filepath.Glob(pattern)
		noError(t, err)
		for _, file := range files {
			text, err := os.ReadFile(file)
			noError(t, err)
			for _, m := range markdownLink.FindAllStringSubmatch(string(text), -1) {
				if strings.Contains(m[1], "://") {
					continue
				}
				n++
				if _, err := os.Stat(filepath.Join(filepath.Dir(file), m[1])); err != nil {
					t.Errorf("%s links to %s: %v", file, m[1], err)
				}
			}
		}
	}
	if n < 20 {
		t.Errorf("only %d links were found", n)
	}
}

// TestDesignMap: each file and test that the map of docs/design.md names exists.
func TestDesignMap(t *testing.T) {
	text, err := os.ReadFile("docs/design.md")
	noError(t, err)
	tests := testNames(t)
	isFile := regexp.MustCompile(`^[\w./]+\.(go|sql|md)$`)
	n := 0
	for line := range strings.Lines(string(text)) {
		if !strings.HasPrefix(line, "| ") {
			continue
		}
		for _, m := range quoted.FindAllStringSubmatch(line, -1) {
			switch name := m[1]; {
			case testName.MatchString(name):
				if !tests[name] {
					t.Errorf("docs/design.md names %s, there is no such test", name)
				}
			case isFile.MatchString(name):
				if _, err := os.Stat(name); err != nil {
					t.Errorf("docs/design.md names %s: %v", name, err)
				}
			default:
				continue
			}
			n++
		}
	}
	if n < 30 {
		t.Errorf("only %d files and tests were found", n)
	}
}

// TestDocumentsSpeakOfTheProjectAlone: what nobody outside a workshop can follow has no place in them.
func TestDocumentsSpeakOfTheProjectAlone(t *testing.T) {
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/decisions/*.md", "Makefile", ".ci/run"} {
		files, err := filepath.Glob(pattern)
		noError(t, err)
		for _, file := range files {
			text, err := os.ReadFile(file)
			noError(t, err)
			for _, word := range []string{"/work/", "/home/", "/tmp/", "TODO", "FIXME"} {
				if strings.Contains(string(text), word) {
					t.Errorf("%s says %s", file, word)
				}
			}
		}
	}
}
