package main

import (
	"errors"
	"flag"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/weirhq/weir/docs"
	"github.com/weirhq/weir/sql"
)

var update = flag.Bool("update", false, "write what the statements of docs/errors.md print into it, instead of comparing")

// TestExplainNamesEveryError: docs/errors.md has the codes that the SQL functions raise and that errors.go knows, with their names in
// Go, and no others; what a code means is what docs/sql.md says.
func TestExplainNamesEveryError(t *testing.T) {
	t.Parallel()
	want := map[string]string{} // code -> name in Go
	for _, f := range sql.List("functions") {
		for _, m := range regexp.MustCompile(`errcode = '(WE\d{3})'`).FindAllStringSubmatch(sql.Text(sql.DefaultSchema, f), -1) {
			want[m[1]] = ""
		}
	}
	names := map[string]bool{}
	file, err := parser.ParseFile(token.NewFileSet(), "../../errors.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	text := func(e ast.Expr) string {
		literal, ok := e.(*ast.BasicLit)
		if !ok {
			return ""
		}
		s, _ := strconv.Unquote(literal.Value)
		return s
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncDecl:
			return n.Name.Name == "explain"
		case *ast.ValueSpec:
			if strings.HasPrefix(n.Names[0].Name, "Err") {
				names[n.Names[0].Name] = true
			}
		case *ast.KeyValueExpr:
			if code := text(n.Key); code != "" {
				want[code] = n.Value.(*ast.Ident).Name
			}
		case *ast.CaseClause: // of explain()
			for _, e := range n.List {
				want[text(e)] = "ErrSchemaMissing"
			}
		}
		return true
	})
	if len(names) < 15 || want["WE010"] != "ErrLeaseLost" || want["42883"] == "" {
		t.Fatalf("errors.go was not understood: %v, %v", names, want)
	}
	got := map[string]string{}
	explained := map[string]bool{}
	for _, e := range explanations() {
		for _, code := range e.Codes {
			if _, twice := got[code]; twice {
				t.Errorf("%s is explained twice", code)
			}
			got[code] = e.Go
		}
		if e.Go != "" {
			explained[e.Go] = true
		}
		if e.Means == "" || e.Cause == "" || e.Changed == "" || e.Remedy == "" || e.Example == "" && e.Prints == "" {
			t.Errorf("something is missing: %+v", e)
		}
	}
	if !maps.Equal(got, want) {
		t.Errorf("the codes are %v, want %v", got, want)
	}
	if !maps.Equal(explained, names) {
		t.Errorf("the names are %v, want %v", explained, names)
	}

	table, err := os.ReadFile("../../docs/sql.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile("(?m)^\\| `(WE\\d{3})` \\| (.*?) \\|").FindAllStringSubmatch(string(table), -1) {
		if means := explain(m[1])[0].Means; !strings.EqualFold(means, m[2]+".") {
			t.Errorf("%s means %q, docs/sql.md says %q", m[1], means, m[2])
		}
	}
}

// TestExplainExamples runs the statements of docs/errors.md: each ends with an error of its section's codes, and with what it prints.
func TestExplainExamples(t *testing.T) {
	c := newCLI(t)
	conn, err := pgx.Connect(t.Context(), c.dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	run := func(text string) error {
		_, err := conn.PgConn().Exec(t.Context(), text).ReadAll()
		return err
	}
	_, setup, _ := strings.Cut(docs.Errors, "```sql\n")
	setup, _, _ = strings.Cut(setup, "```")
	if err := run(setup); err != nil {
		t.Fatal(err)
	}
	c.ok("", "tail", "orders") // until it is settled
	document := docs.Errors
	for _, e := range explanations() {
		name := e.names()[0]
		if len(e.Codes) == 0 || name == "WE006" { // there is no standby
			continue
		}
		err := run("begin; " + e.Example)
		if err := run("rollback"); err != nil {
			t.Fatal(err)
		}
		var pg *pgconn.PgError
		if !errors.As(err, &pg) || !slices.Contains(e.Codes, pg.Code) {
			t.Errorf("the example of %s ends with %v", name, err)
			continue
		}
		prints := "ERROR:  " + pg.Message
		if pg.Detail != "" && pg.Code != "23502" { // there it has the row, with its time
			prints += "\nDETAIL:  " + pg.Detail
		}
		if pg.Hint != "" {
			prints += "\nHINT:  " + pg.Hint
		}
		if !*update && prints != e.Prints {
			t.Errorf("the example of %s prints\n%s\nthe document says\n%s", name, prints, e.Prints)
		}
		block := e.Example + "\n```\n\n```text\n"
		document = strings.Replace(document, block+strings.TrimPrefix(e.Prints+"\n", "\n"), block+prints+"\n", 1)
	}
	if *update {
		if err := os.WriteFile("../../docs/errors.md", []byte(document), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func TestExplain(t *testing.T) {
	c := newCLI(t)
	c.dsn = "postgres://nobody@127.0.0.1:1/nothing" // it needs no database
	want := c.ok("", "explain", "WE010")
	if !strings.HasPrefix(want, "WE010, ErrLeaseLost\nThe lease is not held any more.\n\nCause: ") || !strings.Contains(want, "\n\nRemedy: ") || strings.Contains(want, "```") {
		t.Errorf("it says\n%s", want)
	}
	for _, name := range []string{"we010", "10", "010", "ErrLeaseLost", "errleaselost", "weir.ErrLeaseLost"} {
		if got := c.ok("", "explain", name); got != want {
			t.Errorf("explain %s gave\n%s", name, got)
		}
	}
	one := c.objects(c.ok("", "explain", "25006", "--output", "json"))
	if len(one) != 1 || one[0]["go"] != "ErrStandby" || one[0]["remedy"] == "" {
		t.Errorf("as JSON: %v", one)
	}
	if two := c.objects(c.ok("", "explain", "ErrSequence", "--output", "json")); len(two) != 2 {
		t.Errorf("ErrSequence has %d explanations, want 2", len(two))
	}
	table := c.ok("", "explain")
	if lines := strings.Split(strings.TrimSpace(table), "\n"); len(lines) != len(explanations())+1 || !strings.HasPrefix(lines[1], "WE001 ") {
		t.Errorf("the table is\n%s", table)
	}
	for _, name := range []string{"WE099", "99", "ErrNothing", "1000000", ""} {
		c.fails(exitUsage, "", []string{"explain", name}, "is no error of Weir", "WE001, ErrTopicNotFound, WE002")
	}
	if got := c.ok("", "__complete", "explain", ""); !strings.HasPrefix(got, "WE001\tThere is no topic of that name.\nErrTopicNotFound\t") {
		t.Errorf("completing gave %q", got)
	}
}

// TestErrorsNameExplain: an error that carries a code says who explains it.
func TestErrorsNameExplain(t *testing.T) {
	c := newCLI(t)
	c.fails(exitFailed, "", []string{"group", "create", "nope", "g"}, `\n +"weir explain WE001" tells more\n$`)
	c.fails(exitUsage, "", []string{"topic", "create", " a"}, `\(WE003\)\n +"weir explain WE003" tells more\n$`)
	if _, stderr := c.fails(exitUsage, "", []string{"tail"}); strings.Contains(stderr, "explain") {
		t.Errorf("a mistake in the command line says\n%s", stderr)
	}
}
