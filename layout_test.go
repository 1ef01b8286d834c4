package weir_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/weirhq/weir/sql"
)

// This file holds the rules of the tree: what may import what, which file must have which counterpart. A rule is broken where a
// test of its name fails.

const modulePath = "github.com/weirhq/weir"

// goPackage is what "go list" says of a package.
type goPackage struct {
	ImportPath string
	Standard   bool
	Imports    []string
}

func goList(t *testing.T, args ...string) (packages []goPackage) {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list", "-json=ImportPath,Standard,Imports"}, args...)...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list %v: %v\n%s", args, err, stderr.String())
	}
	for d := json.NewDecoder(bytes.NewReader(out)); d.More(); {
		var p goPackage
		noError(t, d.Decode(&p))
		packages = append(packages, p)
	}
	if len(packages) == 0 {
		t.Fatalf("go list %v: no packages", args)
	}
	return packages
}

// TestLibraryDependencies: importing the library pulls in the standard library and pgx, with what pgx needs, and nothing else.
func TestLibraryDependencies(t *testing.T) {
	for _, p := range goList(t, "-deps", ".") {
		allowed := p.Standard || p.ImportPath == modulePath || p.ImportPath == modulePath+"/sql"
		for _, prefix := range []string{"github.com/jackc/", "golang.org/x/text/", "golang.org/x/sync/"} {
			allowed = allowed || strings.HasPrefix(p.ImportPath, prefix)
		}
		if !allowed {
			t.Errorf("the library depends on %s", p.ImportPath)
		}
	}
}

// TestHistoryDependencies: the judge of histories knows nothing of what it judges.
func TestHistoryDependencies(t *testing.T) {
	for _, p := range goList(t, "-deps", "./internal/history") {
		if !p.Standard && p.ImportPath != modulePath+"/internal/history" {
			t.Errorf("internal/history depends on %s", p.ImportPath)
		}
	}
}

// TestExampleImports: the examples get by with what everyone can import.
func TestExampleImports(t *testing.T) {
	for _, p := range goList(t, "./examples/...") {
		for _, i := range p.Imports {
			if strings.HasPrefix(i, modulePath+"/") {
				t.Errorf("%s imports %s", p.ImportPath, i)
			}
		}
	}
}

// goFile is a parsed Go file of the library: no test.
type goFile struct {
	name string
	fset *token.FileSet
	*ast.File
}

func (f goFile) line(n ast.Node) string {
	return fmt.Sprintf("%s:%d", f.name, f.fset.Position(n.Pos()).Line)
}

// goFiles parses the Go files of a folder, tests left out.
func goFiles(t *testing.T, folder string) (files []goFile) {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(folder, "*.go"))
	noError(t, err)
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		fset := token.NewFileSet()
		f, err := parser.ParseFile(fset, name, nil, parser.ParseComments)
		noError(t, err)
		files = append(files, goFile{name, fset, f})
	}
	if len(files) == 0 {
		t.Fatalf("no Go files in %s", folder)
	}
	return files
}

// literal is the value of a string literal.
func literal(n ast.Node) (string, bool) {
	lit, ok := n.(*ast.BasicLit)
	if !ok || lit.Kind != token.STRING {
		return "", false
	}
	s, err := strconv.Unquote(lit.Value)
	return s, err == nil
}

// TestSQLFilesHaveCallers: every statement in sql/client is sent by the library, and every statement that it names is there.
func TestSQLFilesHaveCallers(t *testing.T) {
	statements := map[string]bool{}
	for _, file := range sql.List("client") {
		statements[strings.TrimSuffix(filepath.Base(file), ".sql")] = true
	}
	named := map[string]bool{}
	for _, f := range goFiles(t, ".") {
		ast.Inspect(f.File, func(n ast.Node) bool {
			if s, ok := literal(n); ok {
				named[s] = true
			}
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			// text(name), query(ctx, querier, name, ...), one[T](ctx, client, querier, name, ...)
			at := -1
			switch fun := call.Fun.(type) {
			case *ast.SelectorExpr:
				switch fun.Sel.Name {
				case "text":
					at = 0
				case "query":
					at = 2
				}
			case *ast.IndexExpr:
				if id, ok := fun.X.(*ast.Ident); ok && id.Name == "one" {
					at = 3
				}
			}
			if at < 0 || at >= len(call.Args) {
				return true
			}
			if name, ok := literal(call.Args[at]); ok && !statements[name] {
				t.Errorf("%s names the statement %q: there is no sql/client/%s.sql", f.line(call), name, name)
			}
			return true
		})
	}
	for name := range statements {
		if !named[name] {
			t.Errorf("sql/client/%s.sql has no caller", name)
		}
	}
}

var createsFunction = regexp.MustCompile(`(?m)^create or replace function weir\.(\w+)\(`)

// TestSQLFunctionsAreInstalled: what the files in sql/functions create is what an install has, one to one.
func TestSQLFunctionsAreInstalled(t *testing.T) {
	written := map[string]string{}
	for _, file := range sql.List("functions") {
		creates := createsFunction.FindAllStringSubmatch(sql.Text(sql.DefaultSchema, file), -1)
		if len(creates) == 0 {
			t.Errorf("sql/%s creates no function", file)
		}
		for _, c := range creates {
			if other := written[c[1]]; other != "" && other != file {
				t.Errorf("sql/%s and sql/%s both create %s", other, file, c[1])
			}
			written[c[1]] = file
		}
	}
	_, dsn := open(t, nil)
	installed := column[string](t, connect(t, dsn), "select distinct proname::text from pg_proc where pronamespace = 'weir'::regnamespace")
	for name, file := range written {
		if !slices.Contains(installed, name) {
			t.Errorf("sql/%s has the function %s, which is not installed", file, name)
		}
	}
	for _, name := range installed {
		if written[name] == "" {
			t.Errorf("function weir.%s is installed, but is in no file of sql/functions", name)
		}
	}
}

// TestSQLFilesHaveHeaders: every file that runs in a database begins by saying what it is.
func TestSQLFilesHaveHeaders(t *testing.T) {
	n := 0
	noError(t, filepath.WalkDir(".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(name) != ".sql" || strings.Contains(filepath.ToSlash(name), "testdata/") {
			return err
		}
		n++
		text, err := os.ReadFile(name)
		if err == nil && !regexp.MustCompile(`^-- \S.{10}`).Match(text) {
			t.Errorf("%s does not begin with a comment that says what it is", name)
		}
		return err
	}))
	if n < 50 {
		t.Errorf("only %d .sql files were found", n)
	}
}

// sqlText recognises a statement; sessionCommand those that may stand in Go, because they set up a session or a transaction,
// and take no values.
var (
	sqlText = regexp.MustCompile(`(?is)^\s*(select\s|insert\s+into\s|update\s+[\w."]+\s+(as\s+\w+\s+)?set\s|delete\s+from\s|merge\s+into\s|truncate\s|with\s+\w+\s+as\b|` +
		`(create|alter|drop)\s+(or\s+replace\s+)?(unlogged\s+|temp\s+)?(table|schema|function|index|view|role|database|sequence|type|extension)\b|` +
		`grant\s|revoke\s|copy\s+\S+\s*(\(|from\b|to\s+std)|do\s+\$|call\s|listen\s|notify\s|unlisten\b|set\s+(local\s|session\s)?\w+\s*(=|to)|` +
		`begin\b|commit\b|rollback\b|savepoint\s)`)
	sessionCommand = regexp.MustCompile(`(?is)^\s*(listen|unlisten|set local|begin|commit|rollback|savepoint)\b`)
	// sqlInGo are statements that stand in Go for a reason of their own.
	sqlInGo = map[string]string{
		`create schema "`:                        "the name cannot be a parameter, and there is no schema yet whose files could be read for it",
		"select to_regnamespace($1) is not null": "asks about the schema itself, before anything of it can be named",
	}
)

// TestNoSQLInGo: SQL stands in .sql files, session commands apart.
func TestNoSQLInGo(t *testing.T) {
	for _, f := range goFiles(t, ".") {
		ast.Inspect(f.File, func(n ast.Node) bool {
			s, ok := literal(n)
			if ok && sqlText.MatchString(s) && !sessionCommand.MatchString(s) && sqlInGo[s] == "" {
				t.Errorf("%s holds SQL: %q", f.line(n), s)
			}
			return true
		})
	}
}

// TestExportedSymbolsAreDocumented: whoever can use it is told what it does.
func TestExportedSymbolsAreDocumented(t *testing.T) {
	for _, folder := range []string{".", "sql", "metrics", "tracing", "internal/pgtest", "internal/history", "bench"} {
		for _, f := range goFiles(t, folder) {
			for _, d := range f.Decls {
				switch d := d.(type) {
				case *ast.FuncDecl:
					if d.Name.IsExported() && exportedReceiver(d) && d.Doc.Text() == "" && !wellKnown[d.Name.Name] {
						t.Errorf("%s: %s has no comment", f.line(d), d.Name.Name)
					}
				case *ast.GenDecl:
					for _, s := range d.Specs {
						switch s := s.(type) {
						case *ast.TypeSpec:
							if s.Name.IsExported() && d.Doc.Text() == "" && s.Doc.Text() == "" {
								t.Errorf("%s: %s has no comment", f.line(s), s.Name.Name)
							}
						case *ast.ValueSpec:
							if s.Names[0].IsExported() && d.Doc.Text() == "" && s.Doc.Text() == "" && s.Comment.Text() == "" {
								t.Errorf("%s: %s has no comment", f.line(s), s.Names[0].Name)
							}
						}
					}
				}
			}
		}
	}
}

// wellKnown are methods whose meaning an interface of the standard library gives.
var wellKnown = map[string]bool{"Error": true, "Unwrap": true, "String": true}

func exportedReceiver(d *ast.FuncDecl) bool {
	if d.Recv == nil {
		return true
	}
	typ := d.Recv.List[0].Type
	for {
		switch x := typ.(type) {
		case *ast.StarExpr:
			typ = x.X
		case *ast.IndexExpr:
			typ = x.X
		case *ast.Ident:
			return x.IsExported()
		default:
			return false
		}
	}
}

// guarantee is a row of the table in docs/guarantees.md.
type guarantee struct {
	number, statement, assumes, enforced, attacked, check string
}

func guarantees(t *testing.T) (rows []guarantee) {
	t.Helper()
	text, err := os.ReadFile("docs/guarantees.md")
	noError(t, err)
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if !strings.HasPrefix(line, "| G") {
			continue
		}
		if len(cells) != 6 {
			t.Fatalf("docs/guarantees.md: a row of %d cells, there are to be 6: %s", len(cells), line)
		}
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		rows = append(rows, guarantee{cells[0], cells[1], cells[2], cells[3], cells[4], cells[5]})
	}
	return rows
}

var (
	quoted   = regexp.MustCompile("`([^`]+)`")
	testName = regexp.MustCompile(`^Test\w+(/\w+)?$`)
)

// TestGuaranteesNameWhatExists: each guarantee names the files that enforce it, the tests that attack it and its invariants,
// and all of them exist. What is not built says "not yet".
func TestGuaranteesNameWhatExists(t *testing.T) {
	rows := guarantees(t)
	tests := testNames(t)
	for i, g := range rows {
		if want := fmt.Sprintf("G%d", i+1); g.number != want {
			t.Errorf("row %d is %s, it is to be %s", i+1, g.number, want)
		}
		built := !strings.HasPrefix(g.attacked, "not yet: ")
		files := quoted.FindAllStringSubmatch(g.enforced, -1)
		if built && len(files) == 0 {
			t.Errorf("%s names no file that enforces it", g.number)
		}
		for _, f := range files {
			if _, err := os.Stat(f[1]); err != nil {
				t.Errorf("%s names the file %s: %v", g.number, f[1], err)
			}
		}
		attacks := 0
		for _, name := range quoted.FindAllStringSubmatch(g.attacked, -1) {
			if !testName.MatchString(name[1]) {
				continue
			}
			attacks++
			if !tests[name[1]] {
				t.Errorf("%s names %s, there is no such test", g.number, name[1])
			}
		}
		if built && attacks == 0 {
			t.Errorf("%s names no test that attacks it", g.number)
		}
		for _, name := range quoted.FindAllStringSubmatch(g.check, -1) {
			if _, err := os.Stat("sql/check/" + name[1] + ".sql"); err != nil {
				t.Errorf("%s names the invariant %s: %v", g.number, name[1], err)
			}
		}
	}
	if len(rows) < 12 {
		t.Errorf("docs/guarantees.md has %d guarantees, there are to be 12", len(rows))
	}
}

// TestInvariantsNameGuarantees: an invariant that says which guarantee it belongs to is named by that guarantee.
func TestInvariantsNameGuarantees(t *testing.T) {
	named := map[string]string{}
	for _, g := range guarantees(t) {
		for _, name := range quoted.FindAllStringSubmatch(g.check, -1) {
			named[name[1]] += g.number + " "
		}
	}
	for _, file := range sql.List("check") {
		name := strings.TrimSuffix(filepath.Base(file), ".sql")
		for _, g := range regexp.MustCompile(`\bG\d+\b`).FindAllString(sql.Purpose(file), -1) {
			if !strings.Contains(named[name]+" ", g+" ") {
				t.Errorf("sql/%s says that it belongs to %s, whose row in docs/guarantees.md does not name it", file, g)
			}
		}
	}
}

// testNames are the tests of the module, with the scenarios of the fence as subtests of TestFence.
func testNames(t *testing.T) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	declares := regexp.MustCompile(`(?m)^func (Test\w+)\(t \*testing\.T\)`)
	scenario := regexp.MustCompile(`(?m)^\t"(\w+)": +\w+,$`)
	noError(t, filepath.WalkDir(".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(name, "_test.go") {
			return err
		}
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		for _, m := range declares.FindAllSubmatch(text, -1) {
			names[string(m[1])] = true
		}
		if filepath.ToSlash(name) == "sql/fence_test.go" {
			for _, m := range scenario.FindAllSubmatch(text, -1) {
				names["TestFence/"+string(m[1])] = true
			}
		}
		return nil
	}))
	return names
}

// TestPlpgsqlCheck: the static checker of PL/pgSQL finds nothing in any function.
func TestPlpgsqlCheck(t *testing.T) {
	_, dsn := open(t, nil)
	conn := connect(t, dsn)
	if _, err := conn.Exec(t.Context(), "create extension plpgsql_check"); err != nil {
		t.Fatalf("%v\nremedy: install the extension plpgsql_check for this server's version, on Debian: "+
			"apt-get install postgresql-NN-plpgsql-check", err)
	}
	for _, found := range column[string](t, conn, `
		select p.oid::regprocedure || ': ' || m
		from pg_proc as p
		join pg_language as l on l.oid = p.prolang and l.lanname = 'plpgsql'
		cross join lateral plpgsql_check_function(p.oid, fatal_errors => false, extra_warnings => false) as m
		where p.pronamespace = 'weir'::regnamespace`) {
		t.Error(found)
	}
}
